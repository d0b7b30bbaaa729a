"""What a newcomer does first: `infra/up`, with the real model and with the simulated one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.local.paths import DEFAULT_MODELS_DIR, PROJECT_ROOT

FREE_PORTS = ("--port", "0", "--sql-port", "0", "--kafka-port", "0")
TIMEOUT_S = 300.0


def up(data_dir: Path, *options: str) -> subprocess.Popen[str]:
    argv: Sequence[str] = (
        sys.executable,
        "-m",
        "infra.up",
        "--data-dir",
        str(data_dir),
        "--models-dir",
        str(DEFAULT_MODELS_DIR),
        *FREE_PORTS,
        *options,
    )
    return subprocess.Popen(
        argv, cwd=PROJECT_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def processes_of(data_dir: Path) -> list[str]:
    """Command lines of living processes that name the data folder or hold it in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if str(data_dir).encode() in told and int(process.name) != os.getpid():
            found.append((process / "cmdline").read_text())
    return found


def billed_requests(output: str) -> dict[str, int]:
    """Requests by class, from the table that was printed."""
    rows = [[cell.strip() for cell in line.split("│")] for line in output.splitlines() if "│ demo" in line]
    return {row[3]: int(row[4]) for row in rows}


@pytest.mark.parametrize("runner", ["simulated", "torch"])
def test_once_shows_all_three_uses_and_leaves_nothing(runner: str, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    for start in (1, 2):  # the second finds the data of the first
        process = up(data_dir, "--once", "--runner", runner)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output
        assert ("serving on " in output) == (runner == "torch")
        assert billed_requests(output) == {"batch": 3 * start, "interactive": start}
        assert processes_of(data_dir) == []


def test_fresh_begins_anew(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    for options in ((), ("--fresh",)):
        process = up(data_dir, "--once", "--runner", "simulated", *options)
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output
    assert billed_requests(output) == {"batch": 3, "interactive": 1}  # nothing of the first run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_all_in_order(number: signal.Signals, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    process = up(data_dir, "--runner", "simulated")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "requests done" in line:
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(lines) + output
    assert "stopped" in output
    assert processes_of(data_dir) == []


def test_a_second_start_on_the_same_data_is_refused(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    first = up(data_dir, "--runner", "simulated")
    try:
        deadline = time.monotonic() + 60
        while not (data_dir / "endpoints.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        output, _ = (second := up(data_dir, "--once", "--runner", "simulated")).communicate(timeout=60)
        assert second.returncode == 1
        assert "is in use by" in output
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)


def test_a_child_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    process = up(data_dir, "--runner", "simulated")
    assert process.stdout is not None
    for line in process.stdout:
        if "requests done" in line:
            break
    pid = next(int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_admission_of(p, data_dir) is not None)
    os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "admission-0 died with signal SIGKILL" in output
    assert str(data_dir / "logs" / "admission-0.log") in output
    assert processes_of(data_dir) == []


def _is_admission_of(process: Path, data_dir: Path) -> Path | None:
    try:
        if b"admission" in (process / "cmdline").read_bytes():
            stdout = os.readlink(process / "fd" / "1")
            return process if stdout.startswith(str(data_dir)) else None
    except OSError:
        pass
    return None


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = up(tmp_path / "data", "--once", "--runner", "simulated", "--port", str(port))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"port {port} is in use" in output
