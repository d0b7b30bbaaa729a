"""A short chaos run, as the command does it: faults of each kind that need no long wait, and accounts."""

import json
import subprocess
import sys

from infra.local.paths import PROJECT_ROOT

# A process each of those that streams hang on, at the places where most can go wrong; and the broker.
FAULTS = (
    "gateway_and_worker_killed",
    "at_worker.tokens_acked",
    "at_admission.dispatch_acked",
    "black_holed_5s",
)
TIMEOUT_S = 280.0


def test_nothing_is_lost_doubled_or_hung_whatever_dies() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "infra.chaos_run", "--seconds", "60", "--seed", "7", "--only", *FAULTS],
        cwd=PROJECT_ROOT,
        timeout=TIMEOUT_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures["findings"] == []
    assert ran.returncode == 0
    assert figures["faults"], "no fault was done"
    assert figures["requests"] > 0
    assert figures["items"] > 0
