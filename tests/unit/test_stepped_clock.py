"""A process of the chaos run whose clock is stepped while it runs."""

import subprocess
import sys
from pathlib import Path

SHOWN = """
import sys, time
from pathlib import Path
from infra.chaos_run.stepped_clock import step_by_file
from schemas.clock import epoch_ms

path = Path(sys.argv[1])
true, monotonic = time.time, time.monotonic()
step_by_file(path)
for ahead in (None, 10_000, -10_000, None):
    path.unlink(missing_ok=True)
    if ahead is not None:
        path.write_text(str(ahead))
    time.sleep(0.06)
    print(round(time.time() - true()), round(epoch_ms() / 1000 - true()))
assert time.monotonic() - monotonic < 5
"""


def test_all_that_tells_the_time_is_off_while_its_file_is_there(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", SHOWN, str(tmp_path / "clock")]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split() == ["0", "0", "10", "10", "-10", "-10", "0", "0"]
