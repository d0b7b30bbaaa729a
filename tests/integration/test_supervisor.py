import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.local.child import Child, ChildDiedError, ChildNotReadyError, ChildSpec, ChildState
from infra.local.supervisor import Supervisor

# Writes its name to a file when it is told to end, so that tests see the order.
SERVICE = """
import pathlib, signal, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def end(*_):
    time.sleep(0.05)
    with (folder / "ended").open("a") as file:
        file.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
(folder / f"{name}.ready").touch()
print("serving", name, flush=True)
while True:
    time.sleep(60)
"""
MakeChild = Callable[..., Child]


@pytest.fixture
def make_child(tmp_path: Path) -> MakeChild:
    def make(name: str, code: str = SERVICE, start_timeout: float = 10.0, stop_timeout: float = 5.0) -> Child:
        async def ready() -> bool:
            return (tmp_path / f"{name}.ready").exists()

        argv = [sys.executable, "-c", code, name, str(tmp_path)]
        log_file = tmp_path / "logs" / f"{name}.log"
        spec = ChildSpec(name, argv, os.environ, log_file, ready, start_timeout, stop_timeout)
        return Child(spec)

    return make


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")


async def wait_until(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - other processes set no Event
            await asyncio.sleep(0.01)


async def test_a_child_is_ready_when_its_probe_says_so_and_writes_to_its_log(make_child: MakeChild) -> None:
    child = make_child("one")
    await child.start()
    assert child.state is ChildState.READY
    assert child.last_lines() == "serving one"
    pid = child.pid
    await child.stop()
    assert child.exit_status == 0
    assert not is_running(pid)
    child.check_alive()  # it was asked to end


async def test_a_child_that_dies_while_it_starts_is_reported_with_its_last_lines(
    make_child: MakeChild,
) -> None:
    child = make_child("broken", "import sys; print('no such model'); sys.exit(3)")
    with pytest.raises(
        ChildDiedError, match=r"broken died with exit 3: see .*broken\.log\n    no such model"
    ):
        await child.start()
    assert not child.running


async def test_a_program_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    child = Child(ChildSpec("ghost", ["/no/such/program"], os.environ, tmp_path / "ghost.log", never))
    with pytest.raises(ChildDiedError, match="cannot run /no/such/program: No such file"):
        await child.start()


async def test_a_child_that_is_never_ready_is_killed_at_the_deadline(make_child: MakeChild) -> None:
    child = make_child("slow", "import time; print('loading', flush=True); time.sleep(60)", start_timeout=0.5)
    with pytest.raises(ChildNotReadyError, match=r"slow was not ready within 0\.5 s: see .*\n    loading"):
        await child.start()
    assert not child.running


async def test_a_probe_that_hangs_hides_no_death(tmp_path: Path) -> None:
    async def hangs() -> bool:
        await asyncio.sleep(60)
        return True

    argv = [sys.executable, "-c", "import time; time.sleep(0.2)"]
    child = Child(ChildSpec("hung", argv, os.environ, tmp_path / "hung.log", hangs))
    async with asyncio.timeout(5):
        with pytest.raises(ChildDiedError, match="exit 0"):
            await child.start()


async def test_a_child_that_ignores_sigterm_is_killed(make_child: MakeChild) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVICE.replace(
        "signal.signal(signal.SIGTERM, end)", ""
    )
    child = make_child("stubborn", code, stop_timeout=0.3)
    await child.start()
    await child.stop()
    assert child.exit_status == -signal.SIGKILL


async def test_what_a_child_started_ends_with_it(make_child: MakeChild, tmp_path: Path) -> None:
    code = (
        "import subprocess, pathlib, sys\n"
        "other = subprocess.Popen(['sleep', '60'])\n"
        "pathlib.Path(sys.argv[2], 'other').write_text(str(other.pid))\n" + SERVICE
    )
    child = make_child("parent", code)
    await child.start()
    other = int((tmp_path / "other").read_text())
    assert is_running(other)
    os.kill(child.pid, signal.SIGKILL)
    await wait_until(lambda: not child.running)
    await wait_until(lambda: not is_running(other))
    with pytest.raises(ChildDiedError, match="died with signal SIGKILL"):
        child.check_alive()


async def test_waves_stop_in_reverse_order(make_child: MakeChild, tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start([make_child("a")], [make_child("b1"), make_child("b2")], [make_child("c")])
    await supervisor.stop()
    ended = (tmp_path / "ended").read_text().split()
    assert ended[0] == "c"
    assert sorted(ended[1:3]) == ["b1", "b2"]
    assert ended[3] == "a"


async def test_one_that_fails_stops_those_that_start_with_it_and_no_other(make_child: MakeChild) -> None:
    supervisor = Supervisor()
    old, neighbour, broken = make_child("old"), make_child("neighbour"), make_child("broken", "exit(1)")
    await supervisor.start([old])
    with pytest.raises(ChildDiedError, match="broken died"):
        await supervisor.start([neighbour], [broken])
    assert old.running
    assert not neighbour.running
    assert list(supervisor.children) == [old]
    await supervisor.stop()
    assert not old.running


async def test_an_unexpected_death_ends_the_watch(make_child: MakeChild) -> None:
    supervisor = Supervisor()
    child = make_child("one")
    await supervisor.start([child])
    watch = asyncio.ensure_future(supervisor.watch())
    await asyncio.sleep(0.05)
    os.kill(child.pid, signal.SIGSEGV)
    async with asyncio.timeout(2):
        with pytest.raises(ChildDiedError, match="one died with signal SIGSEGV"):
            await watch
    await supervisor.stop()


async def test_a_restart_gives_a_new_process_and_the_watch_goes_on(make_child: MakeChild) -> None:
    supervisor = Supervisor()
    child = make_child("one")
    await supervisor.start([child])
    watch = asyncio.ensure_future(supervisor.watch())
    first = child.pid
    await supervisor.restart("one")
    child.kill()
    await supervisor.restart("one")
    await asyncio.sleep(0.2)
    assert child.running
    assert child.pid != first
    assert not watch.done()
    watch.cancel()
    await supervisor.stop()


async def test_a_cancelled_stop_still_leaves_nothing(make_child: MakeChild) -> None:
    supervisor = Supervisor()
    code = SERVICE.replace("time.sleep(0.05)", "time.sleep(60)")
    children = [make_child("a", code), make_child("b", code)]
    await supervisor.start(*([child] for child in children))
    stop = asyncio.ensure_future(supervisor.stop())
    await asyncio.sleep(0.1)
    stop.cancel()
    await asyncio.gather(stop, return_exceptions=True)
    assert not any(child.running for child in children)


async def test_names_are_unique_and_unknown_ones_refused(make_child: MakeChild) -> None:
    supervisor = Supervisor()
    with pytest.raises(ValueError, match="same name: one"):
        await supervisor.start([make_child("one")], [make_child("one")])
    await supervisor.start([make_child("two")])
    with pytest.raises(KeyError, match="no child is called 'one': there are two"):
        supervisor.child("one")
    await supervisor.stop()


async def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, pathlib, sys
from infra.local.child import Child, ChildSpec
async def yes(): return True
async def main():
    log = pathlib.Path({str(tmp_path)!r}, "log")
    child = Child(ChildSpec("sleeper", ["sleep", "60"], os.environ, log, yes))
    await child.start()
    print(child.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    # Not asyncio's: its transport would outlive the kill and warn.
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    assert is_running(pid)
    supervisor.kill()
    supervisor.communicate()
    await wait_until(lambda: not is_running(pid))


async def test_a_terminals_interrupt_does_not_reach_a_child(make_child: MakeChild) -> None:
    child = make_child("one")
    await child.start()
    assert os.getpgid(child.pid) == os.getsid(child.pid) == child.pid
    assert os.getsid(child.pid) != os.getsid(0)
    await child.stop()


async def test_a_large_log_is_set_aside_at_the_next_start(make_child: MakeChild) -> None:
    child = make_child("one")
    log_file = child.spec.log_file
    log_file.parent.mkdir()
    with log_file.open("wb") as log:
        log.truncate((16 << 20) + 1)
    await child.start()
    await child.stop()
    assert log_file.stat().st_size < 1000
    assert log_file.with_name("one.log.1").stat().st_size > 16 << 20
