"""Kernels against their references: on a GPU where there is one, else in Triton's interpreter.

The interpreter is chosen when kernels are decorated, so it is never mixed with what compiles them:
`tests/unit/test_kernels_interpreted.py` runs this folder in a process of its own.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    for item in items:
        if "tests/triton" in item.path.as_posix():
            item.add_marker(pytest.mark.cuda)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
