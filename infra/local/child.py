"""One child process: started in a session of its own, waited for, watched, stopped."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from infra.local.paths import PROJECT_ROOT

Probe = Callable[[], Awaitable[bool]]

_LAUNCHER = Path(__file__).with_name("launcher.py")
_POLL_S = 0.01
_LOG_ROTATE_BYTES = 16 << 20
_LAST_LINES = 15
_KILL_S = 10


class ChildState(Enum):
    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    EXITED = "exited"


_TRANSITIONS: dict[ChildState, frozenset[ChildState]] = {
    ChildState.NEW: frozenset({ChildState.STARTING}),
    ChildState.STARTING: frozenset({ChildState.READY, ChildState.STOPPING, ChildState.EXITED}),
    ChildState.READY: frozenset({ChildState.STOPPING, ChildState.EXITED}),
    ChildState.STOPPING: frozenset({ChildState.EXITED}),
    ChildState.EXITED: frozenset({ChildState.STARTING}),
}


class ChildError(RuntimeError):
    """A child died or did not get ready. The message names it, its log file and the last lines there."""

    def __init__(self, name: str, what: str, log_file: Path, last_lines: str) -> None:
        indented = "".join(f"\n    {line}" for line in last_lines.splitlines())
        super().__init__(f"{name} {what}: see {log_file}{indented}")
        self.name = name
        self.log_file = log_file
        self.last_lines = last_lines


class ChildDiedError(ChildError):
    """`exit_status` is the exit code, or minus the number of the signal that killed it."""

    def __init__(self, name: str, exit_status: int, log_file: Path, last_lines: str) -> None:
        super().__init__(name, f"died with {describe_exit(exit_status)}", log_file, last_lines)
        self.exit_status = exit_status


class ChildNotReadyError(ChildError):
    """The child lives but was not ready by the deadline."""


def describe_exit(status: int) -> str:
    """ "exit 1", or "signal SIGKILL" for a status below zero."""
    if status >= 0:
        return f"exit {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to run a child. `env` is its whole environment; `ready` is asked until it answers True.

    Times in seconds. `pass_fds` stay open in the child: a lock that should outlive us is handed on so.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_file: Path
    ready: Probe
    start_timeout: float = 60.0
    stop_timeout: float = 10.0
    pass_fds: tuple[int, ...] = ()
    cwd: Path = PROJECT_ROOT


class Child:
    """A process run from a ChildSpec, again and again if need be.

    It leads a session of its own, so a terminal's Ctrl-C does not reach it. What it leaves in its process
    group is killed after it. The kernel kills it when the thread that started it ends, even by kill -9.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.state = ChildState.NEW
        self.exit_status: int | None = None
        self.died = False
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        """Raises RuntimeError when it does not run."""
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process.pid

    @property
    def running(self) -> bool:
        self._reap()
        return self._process is not None

    def transition_to(self, state: ChildState) -> None:
        """Raises RuntimeError on a move that the table does not hold."""
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"{self.name}: {self.state.value} -> {state.value}")
        self.state = state

    async def start(self) -> None:
        """Runs it and returns when it is ready.

        Raises ChildDiedError, or ChildNotReadyError after `start_timeout`; nothing of it runs then.
        """
        if self.running:
            raise RuntimeError(f"{self.name} runs already")
        self._spawn()
        self.transition_to(ChildState.STARTING)
        try:
            await self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        self.transition_to(ChildState.READY)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after `stop_timeout`. Returns when it is gone; fine when it is already."""
        if not self.running:
            return
        self.transition_to(ChildState.STOPPING)
        os.kill(self.pid, signal.SIGTERM)
        try:
            deadline = time.monotonic() + self.spec.stop_timeout
            while self.running and time.monotonic() < deadline:  # noqa: ASYNC110 - the kernel sets no Event
                await asyncio.sleep(_POLL_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to it and its process group. Returns when it is gone; fine when it is already."""
        if not self.running:
            return
        if self.state is not ChildState.STOPPING:
            self.transition_to(ChildState.STOPPING)
        os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_S
        while self.running:
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{self.name} (pid {self.pid}) is still there {_KILL_S} s after SIGKILL")
            time.sleep(0.001)  # blocks, so that no cancellation can leave the process behind

    def check_alive(self) -> None:
        """Raises ChildDiedError when it ended without being asked to."""
        self._reap()
        if self.died:
            assert self.exit_status is not None
            raise ChildDiedError(self.name, self.exit_status, self.spec.log_file, self.last_lines())

    def last_lines(self) -> str:
        """The end of what it wrote since its last start."""
        try:
            with self.spec.log_file.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - 8192))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def _spawn(self) -> None:
        log_file = self.spec.log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        if log_file.exists() and log_file.stat().st_size > _LOG_ROTATE_BYTES:
            log_file.rename(log_file.with_name(log_file.name + ".1"))
        launch = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *self.spec.argv]
        with log_file.open("ab") as log:
            log.write(f"--- {self.name} started {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self.exit_status = None
            self.died = False
            self._process = subprocess.Popen(
                launch,
                env=dict(self.spec.env),
                cwd=self.spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self.spec.pass_fds,
            )

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.spec.start_timeout
        pause = _POLL_S
        while True:
            ready = asyncio.ensure_future(self.spec.ready())
            try:
                # A probe may hang in a service that never answers; its death is noticed meanwhile.
                while not ready.done():
                    self.check_alive()
                    if time.monotonic() >= deadline:
                        raise self._not_ready()
                    await asyncio.wait([ready], timeout=0.05)
                self.check_alive()
                if ready.result():
                    return
            finally:
                ready.cancel()
                await asyncio.gather(ready, return_exceptions=True)
            if time.monotonic() >= deadline:
                raise self._not_ready()
            await asyncio.sleep(pause)
            pause = min(pause * 1.3, 0.1)

    def _not_ready(self) -> ChildNotReadyError:
        what = f"was not ready within {self.spec.start_timeout:g} s"
        return ChildNotReadyError(self.name, what, self.spec.log_file, self.last_lines())

    def _reap(self) -> None:
        """Notes its end, after killing what is left of its group.

        In this order because the group's number can be given to others once the leader is reaped.
        """
        process = self._process
        if process is None or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        os.killpg(process.pid, signal.SIGKILL)
        self.exit_status = process.wait()
        self._process = None
        self.died = self.state is not ChildState.STOPPING
        self.transition_to(ChildState.EXITED)
