"""What is known of this run's engine: whether it gives the right tokens, and whether it moves at all."""

from collections.abc import Callable

from schemas.fleet import CanaryStatus
from workers.canary import NO_CANARY, Canary
from workers.request import Request, RequestOutput


class EngineStalledError(RuntimeError):
    """A step has not ended for so long that it is taken for one that never will."""


class EngineWatch:
    """Pure. `step_age(now)` and `add` are the engine thread's; times in seconds of the monotonic clock.

    A step older than `stall_s` shows in `status`, one older than `stall_exit_s` ends the run. `failed` is set
    once the canary has failed and all that was told before is in the log.
    """

    def __init__(
        self,
        canary: Canary | None,
        step_age: Callable[[float], float],
        add: Callable[[Request], None],
        *,
        stall_s: float,
        stall_exit_s: float,
    ) -> None:
        self.failed = False
        self._canary = canary
        self._step_age = step_age
        self._add = add
        self._stall_s = stall_s
        self._stall_exit_s = stall_exit_s

    @property
    def canaries_begun(self) -> int:
        """Runs of the canary so far; NO_CANARY without one."""
        return NO_CANARY if self._canary is None or not self._canary.known else self._canary.num_begun

    @property
    def canary_passed(self) -> int:
        """The number of its last run that passed; 0 for none."""
        return 0 if self._canary is None else self._canary.passed

    def status(self, now: float) -> CanaryStatus:
        if self.failed:
            return CanaryStatus.FAILED
        if self._step_age(now) > self._stall_s:
            return CanaryStatus.ENGINE_STALLED
        # Its first run came to a good end before this run joined.
        return CanaryStatus.OK if self._canary is not None and self._canary.known else CanaryStatus.UNKNOWN

    def why_not_ready(self, now: float) -> str:
        """Empty while the engine can take work."""
        status = self.status(now)
        return "" if status in (CanaryStatus.OK, CanaryStatus.UNKNOWN) else status

    def check(self, now: float) -> None:
        """Raises EngineStalledError."""
        if (age := self._step_age(now)) > self._stall_exit_s:
            raise EngineStalledError(f"a step has not ended for {age:.0f} s")

    def start_canary(self) -> None:
        """Puts the known prompt into the engine, unless it is there still: a late canary is no wrong one."""
        if self._canary is not None and (request := self._canary.next_run()) is not None:
            self._add(request)

    def on_output(self, output: RequestOutput) -> None:
        """Takes what a request gave that is nobody's. Raises CanaryFailedError if it is a wrong canary's."""
        if self._canary is not None:
            self._canary.on_output(output)
