"""A short chaos run, as the command does it: faults of each kind that need no long wait, and accounts."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from infra.local.paths import PROJECT_ROOT
from infra.local.verbs import VerbsError, ensure_verbs

# A process each of those that streams hang on, at the places where most can go wrong; and the broker.
FAULTS = (
    "gateway_and_worker_killed",
    "at_worker.tokens_acked",
    "at_admission.dispatch_acked",
    "black_holed_5s",
)
# Each side of a handoff, before and behind the word that moves the request.
HANDOFF_FAULTS = ("at_worker.writing", "at_worker.received", "at_worker.handed_off")
TIMEOUT_S = 280.0


def test_nothing_is_lost_doubled_or_hung_whatever_dies() -> None:
    assert chaos("--only", *FAULTS)["requests"] > 0


def test_nothing_is_where_prompts_are_handed_over() -> None:
    try:
        ensure_verbs(os.environ, print)
    except VerbsError as e:
        pytest.skip(str(e))
    audited = chaos("--disaggregated", "--only", *HANDOFF_FAULTS)["audited"]
    assert audited["adopted"] > 0


def chaos(*options: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "infra.chaos_run", "--seconds", "60", "--seed", "7", *options],
        cwd=PROJECT_ROOT,
        timeout=TIMEOUT_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert figures["findings"] == []
    assert ran.returncode == 0
    assert figures["faults"], "no fault was done"
    assert figures["items"] > 0
    return figures
