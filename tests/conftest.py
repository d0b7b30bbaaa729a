"""Settings of all tests."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]

# As workers have it, and before anything loads OpenMP: where other processes want the cores, threads that
# spin at each barrier made a step of the real model ten times longer.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Machines are shared and noisy: how long an example takes says nothing about the code.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests run in one process, one after another; so do all on the real model, which take all
    cores: two of them at once would wait for each other's threads at every barrier."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "real model" if "model_files" in (ROOT / file).read_text() else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)
