"""The thread that writes to one run of decode: a call of each transfer in turn."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from schemas.records import ContentCheck, Reserved
from workers.handoff.kv_pool import KVPool, content_checks
from workers.handoff.layout import Place
from workers.handoff.transport import TransferError, Transport
from workers.handoff.write_plan import Call, Target, calls

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """What is in flight at once to one run of decode: `max_call_bytes`, in `max_call_copies` pieces.

    Measured over loopback: larger calls are no faster, and one of these takes 2 to 4 ms, which a stop waits
    for. `settle_s` is how long the transport may still read source blocks after a call has failed. With
    `check_all` decode compares all bytes, else samples.
    """

    max_call_bytes: int = 4 << 20
    max_call_copies: int = 64
    settle_s: float = 1.0
    check_all: bool = False


@dataclass(frozen=True, slots=True)
class WriteEvents:
    """Called from the writer's threads; they must not wait.

    `written` (transfer, checks) or `closed` (transfer, may something still land?) is the last word about a
    transfer: no call of it runs then. `failed` (transfer, why) comes before a `closed` that waits for `stop`.
    """

    written: Callable[[bytes, list[ContentCheck]], None]
    failed: Callable[[bytes, str], None]
    closed: Callable[[bytes, bool], None]


class WriteCounters:
    """Since the start. `busy_s` is the time in calls, `queued_s` how long what a call wrote had waited for it
    (in sum). Read them from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_calls = 0
        self.num_copies = 0
        self.num_failures = 0
        self.busy_s = 0.0
        self.queued_s = 0.0

    @property
    def bytes_per_s(self) -> float:
        """While calls ran; 0 before the first."""
        return self.num_bytes / self.busy_s if self.busy_s else 0.0

    def count(self, call: Call, busy_s: float, queued_s: float, failed: bool) -> None:
        with self._lock:
            self.num_calls += 1
            self.busy_s += busy_s
            self.queued_s += queued_s
            if failed:
                self.num_failures += 1
            else:
                self.num_bytes += call.num_bytes
                self.num_copies += len(call.copies)


@dataclass(frozen=True, slots=True)
class Chunk:
    """KV that may be read since `computed_at`."""

    tokens: range
    layers: range
    computed_at: float


@dataclass(eq=False, slots=True)
class Job:
    """One transfer in a lane. Only the lane's thread touches it. No call begins after `until` (s of the
    monotonic clock): a process that was stopped may go on long after the lease."""

    reserved: Reserved
    block_ids: list[int]
    num_tokens: int
    targets: list[Target]
    until: float
    chunks: deque[Chunk] = field(default_factory=deque)
    running: Iterator[Call] | None = None
    computed_at: float = 0.0
    is_complete: bool = False
    stopping: bool = False
    expired: bool = False
    failed: bool = False
    closes_at: float = 0.0

    @property
    def transfer_id(self) -> bytes:
        return self.reserved.transfer_id

    @property
    def is_over(self) -> bool:
        """No call of it begins any more."""
        return self.failed or self.expired or self.stopping


class WriteLane:
    """`may_end` is asked when it was told to end and has no jobs: whether none is on its way to it.

    `over` is called before the last word about a transfer.
    """

    def __init__(
        self,
        name: str,
        pool: KVPool,
        transport: Transport,
        events: WriteEvents,
        limits: WriteLimits,
        counters: WriteCounters,
        over: Callable[[bytes], None],
        may_end: Callable[["WriteLane"], bool],
    ) -> None:
        self._pool = pool
        self._transport = transport
        self._events = events
        self._limits = limits
        self._counters = counters
        self._over = over
        self._may_end = may_end
        self._jobs: dict[bytes, Job] = {}
        self._inputs: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._ending = False
        self._ends_now = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        self._tell(lambda: self._jobs.__setitem__(job.transfer_id, job))

    def change(self, transfer_id: bytes, change: Callable[[Job], None]) -> None:
        """In the thread, and in order; nothing if the job is over by then."""

        def apply() -> None:
            if (job := self._jobs.get(transfer_id)) is not None:
                change(job)

        self._tell(apply)

    def end(self, *, now: bool = False) -> None:
        """When all jobs are over; `now`: when the call that runs has returned."""
        self._ending, self._ends_now = True, now
        self._wake.set()

    def join(self) -> None:
        self._thread.join()

    def _tell(self, what: Callable[[], None]) -> None:
        self._inputs.append(what)
        self._wake.set()

    def _run(self) -> None:
        while not self._ends_now:
            self._wake.clear()
            while self._inputs:
                self._inputs.popleft()()
            busy = [self._turn(job) for job in list(self._jobs.values())]
            if any(busy) or self._inputs:
                continue
            if self._ending and not self._jobs and self._may_end(self):
                return
            settling = [job.closes_at for job in self._jobs.values() if job.stopping]
            self._wake.wait(max(0.0, min(settling) - time.monotonic()) if settling else None)

    def _turn(self, job: Job) -> bool:
        """One call of a transfer, or its end. Returns whether it may have more to do at once."""
        if not job.is_over and time.monotonic() >= job.until:
            job.expired = True
            self._events.failed(job.transfer_id, "lease")
        if job.is_over:
            if job.stopping and time.monotonic() >= job.closes_at:
                self._forget(job)
                self._events.closed(job.transfer_id, job.failed)
            return False
        if (call := self._next_call(job)) is not None:
            self._write(job, call)
            return True
        if job.is_complete:
            layout, first = job.reserved.layout, job.reserved.num_cached_tokens
            source = Place(self._pool.shape, job.block_ids)
            checks = content_checks(
                self._pool, source, layout, first, job.num_tokens, all_of_it=self._limits.check_all
            )
            self._forget(job)
            self._events.written(job.transfer_id, checks)
        return False

    def _next_call(self, job: Job) -> Call | None:
        while True:
            if job.running is not None:
                if (call := next(job.running, None)) is not None:
                    return call
                job.running = None
            if not job.chunks:
                return None
            chunk = job.chunks.popleft()
            job.computed_at = chunk.computed_at
            limits = (self._limits.max_call_bytes, self._limits.max_call_copies)
            job.running = calls(self._pool, job.block_ids, job.targets, chunk.tokens, chunk.layers, *limits)

    def _write(self, job: Job, call: Call) -> None:
        began = time.monotonic()
        error = ""
        try:
            self._transport.write(call.segment, call.copies)
        except TransferError as failure:
            error = str(failure)
        ended = time.monotonic()
        self._counters.count(call, ended - began, began - job.computed_at, bool(error))
        if error:
            log.warning("a KV transfer failed", extra={"transfer": job.transfer_id.hex(), "error": error})
            job.failed, job.closes_at = True, ended + self._limits.settle_s
            self._events.failed(job.transfer_id, error)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.transfer_id]
        self._over(job.transfer_id)
