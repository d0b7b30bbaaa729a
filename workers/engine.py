"""The engine loop, schedule → execute → update_from_output, and the thread that turns it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.batch import ModelRunner, SchedulerOutput, StepWatcher
from workers.engine_stats import EngineStats
from workers.kv_cache_manager import KVCacheManager
from workers.preemption import SwapCost
from workers.request import Request, RequestOutput
from workers.scheduler import Scheduler
from workers.scheduler_config import SchedulerConfig

_NONE_BLOCKED: frozenset[int] = frozenset()
_STATS_INTERVAL_S = 0.02
# A look at all prefix keys takes up to 0.3 ms, which no step should have.
PREFIX_KEYS_INTERVAL_S = 1.0
# Results that may wait to be taken: enough to ride out a busy event loop, few enough that an engine with
# short steps does not run far ahead of it.
_MAX_RESULTS = 16


class Engine:
    """Scheduler, block pools and runner as one. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: ModelRunner,
        kv_cache_manager: KVCacheManager,
        eos_token_ids: Set[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocates the runner's KV memory, as large as the pools of `kv_cache_manager`."""
        self.runner = runner
        self.kv_cache_manager = kv_cache_manager
        self.pool = kv_cache_manager.pool
        self.host_pool = kv_cache_manager.host_pool
        num_host_blocks = self.host_pool.num_blocks if self.host_pool else 0
        runner.initialize_kv_cache(self.pool.num_blocks, num_host_blocks)
        swap_cost = SwapCost(runner.bytes_per_block, runner.swap_bytes_per_s) if num_host_blocks else None
        self.scheduler = Scheduler(config, kv_cache_manager, eos_token_ids, swap_cost)
        self._clock = clock
        self.watcher: StepWatcher | None = None

    def add_request(self, request: Request) -> list[RequestOutput]:
        """See `Scheduler.add_request`."""
        return self.scheduler.add_request(request)

    def abort(self, request_id: bytes, attempt: int) -> list[RequestOutput]:
        """See `Scheduler.abort`."""
        output = self.scheduler.abort(request_id, attempt)
        return [] if output is None else [output]

    def step(
        self, blocked_partitions: Set[int] = _NONE_BLOCKED
    ) -> tuple[SchedulerOutput, list[RequestOutput]]:
        """One turn of the loop. An empty batch is not executed: nothing could be scheduled."""
        began = self._clock()
        batch = self.scheduler.schedule(blocked_partitions)
        watcher = self.watcher
        if watcher is not None:
            watcher.before(batch)
        if not batch.scheduled and not batch.swap_out and not batch.swap_in:
            if watcher is not None:
                watcher.after(batch)
            return batch, []
        sampled = self.runner.execute(batch)
        if watcher is not None:
            watcher.after(batch)
        outputs = self.scheduler.update_from_output(batch, sampled)
        self.scheduler.observe(batch, self._clock() - began)
        return batch, outputs

    def warm_up(self, token_id: int, num_prompt_tokens: int = 32) -> None:
        """Runs one short request to its end, so that the first real one finds memory and kernels ready."""
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        prompt = [token_id] * num_prompt_tokens
        outputs = self.add_request(Request(bytes(16), 0, PriorityClass.INTERACTIVE, prompt, sampling, 0))
        while self.scheduler.has_requests:
            outputs = self.step()[1]
        if outputs[-1].error:
            raise ValueError(f"the warm-up request was refused: {outputs[-1].error}")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one turn of the engine thread did. Times in seconds of the thread's clock.

    `batch` is empty when the outputs come from adds and aborts alone.
    """

    batch: SchedulerOutput
    outputs: list[RequestOutput]
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: bytes
    attempt: int


@dataclass(frozen=True, slots=True)
class _Read:
    priority: PriorityClass
    next_offset: int


# To be done between two steps; returns what it gave or ended.
EngineCall = Callable[[], list[RequestOutput]]


class EngineThread:
    """Turns an engine in a thread of its own. All methods may be called from any thread and never wait.

    `on_results` is called from the engine thread when `take_results` has something to give after it had
    nothing; it must not wait. While `_MAX_RESULTS` lie there, no step is begun. `on_fatal` is called from
    it, once, with the error that ended the loop: what was in the engine is lost, the process must not go on.
    """

    def __init__(
        self,
        engine: Engine,
        on_results: Callable[[], None],
        on_fatal: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._on_results = on_results
        self._on_fatal = on_fatal
        self._clock = clock
        self._inputs: deque[Request | _Abort | _Read | EngineCall] = deque()
        self._results: deque[StepResult] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._blocked: frozenset[int] = _NONE_BLOCKED
        self._busy_since: float | None = None
        self._read_offsets = [0] * len(PriorityClass)
        self._predicted_s = 0.0
        self._stats_at = float("-inf")
        self._keys_at = float("-inf")
        self._keys_num_notes = 0
        self._prefix_keys: tuple[int, ...] | None = None
        self._stats = self._look()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def stats(self) -> EngineStats:
        """The last look, at most a step and 20 ms old."""
        return self._stats

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the loop after the current step; True if that came within `timeout` seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def add(self, request: Request) -> None:
        """Hands a request over for good: only the engine thread touches it from now on."""
        self._put(request)

    def abort(self, request_id: bytes, attempt: int) -> None:
        """Ends the request before the next step, if its attempt is at most `attempt`."""
        self._put(_Abort(request_id, attempt))

    def call(self, call: EngineCall) -> None:
        """Has it called in the engine thread, before the next step and after all that was put before."""
        self._put(call)

    def note_read(self, priority: PriorityClass, next_offset: int) -> None:
        """Says up to where the mailbox was read; shows in `stats` once all added before it does too."""
        self._put(_Read(priority, next_offset))

    def set_blocked(self, partitions: frozenset[int]) -> None:
        """Sequences that reply to these partitions stand still until another call."""
        self._blocked = partitions
        self._wake.set()

    def take_results(self) -> list[StepResult]:
        """All results since the last call, oldest first."""
        results: list[StepResult] = []
        while self._results:
            results.append(self._results.popleft())
        if len(results) >= _MAX_RESULTS:
            self._wake.set()
        return results

    def step_age(self, now: float) -> float:
        """Seconds since the last step ended (or work came), 0 while there is nothing to do."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, now - since)

    def _put(self, item: Request | _Abort | _Read | EngineCall) -> None:
        self._inputs.append(item)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # nobody above this frame would ever hear of it
            self._on_fatal(error)

    def _turn(self) -> None:
        # Cleared before anything is read: what comes later sets it again, so nothing is slept over.
        self._wake.clear()
        began = self._clock()
        if self._busy_since is None:
            self._busy_since = began
        outputs = self._take_inputs()
        batch = SchedulerOutput()
        if len(self._results) < _MAX_RESULTS:
            batch, sampled = self.engine.step(self._blocked)
            outputs += sampled
        ended = self._clock()
        if batch.scheduled:
            self._busy_since = ended
            self._predicted_s = batch.predicted_s
        if not batch.scheduled or ended - self._stats_at >= _STATS_INTERVAL_S:
            self._stats_at = ended
            self._stats = self._look()
        if batch.scheduled or outputs:
            self._results.append(StepResult(batch, outputs, began, ended))
            if len(self._results) == 1:
                self._on_results()
        # Who was preempted for nothing may have made room for another.
        if not batch.scheduled and not batch.preempted:
            self._busy_since = None
            self._wake.wait()

    def _take_inputs(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        inputs = self._inputs
        while inputs:
            item = inputs.popleft()
            if isinstance(item, Request):
                outputs += self.engine.add_request(item)
            elif isinstance(item, _Abort):
                outputs += self.engine.abort(item.request_id, item.attempt)
            elif isinstance(item, _Read):
                self._read_offsets[item.priority] = item.next_offset
            else:
                outputs += item()
        return outputs

    def _look(self) -> EngineStats:
        engine = self.engine
        scheduler, kv, pool, host_pool = (
            engine.scheduler,
            engine.kv_cache_manager,
            engine.pool,
            engine.host_pool,
        )
        meter = scheduler.meter
        now = self._clock()
        index = kv.prefix_index
        # Who goes to sleep tells what it learned last: there may be no other look for long.
        if index is not None and (
            now - self._keys_at >= PREFIX_KEYS_INTERVAL_S
            or (not scheduler.has_requests and index.num_notes != self._keys_num_notes)
        ):
            self._keys_at, self._keys_num_notes = now, index.num_notes
            self._prefix_keys = index.keys()
        return EngineStats(
            num_running=scheduler.num_running,
            num_running_by_class=scheduler.running.len_by_class(),
            num_waiting=scheduler.num_waiting_by_class(),
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free_blocks,
            own_blocks=scheduler.running.own_blocks_by_class(),
            num_host_blocks=host_pool.num_blocks if host_pool else 0,
            free_host_blocks=host_pool.num_free_blocks if host_pool else 0,
            kv_fragmentation=scheduler.fragmentation(),
            prefix_cache_queries=kv.prefix_cache_queries,
            prefix_cache_hits=kv.prefix_cache_hits,
            uncomputed_tokens=scheduler.num_uncomputed_tokens(),
            num_preemptions=scheduler.num_preemptions,
            preemptions=dict(scheduler.preemptions),
            step_time_ms=meter.step_s * 1000,
            predicted_step_ms=self._predicted_s * 1000,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_tokens_per_s=meter.decode_tokens_per_s,
            read_offsets=tuple(self._read_offsets),
            prefix_keys=self._prefix_keys,
        )
