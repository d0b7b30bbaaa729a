"""A worker in virtual time: the shipped scheduler and block pool on the step times of its GPUs.

It is driven by events: `dispatch` hands a request over, `on_step_end` comes when the step, or the last step
of the leap, that it announced to `call_at` is over. In between its heartbeat tells how it was when the last
step ended, as the engine thread does.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from infra.simulator.decode_run import DecodeRun
from infra.simulator.engine import make_scheduler
from infra.simulator.handoffs import Handoff, Handoffs
from infra.simulator.measures import Flight, Measures
from infra.simulator.scenario import Model, Workers, kv_layout, step_costs
from infra.simulator.worker_handoffs import WorkerHandoffs
from schemas.priority import PriorityClass
from schemas.records import ClassLoad, Dispatch, WorkerStatus
from workers.batch import RunnerOutput, SchedulerOutput
from workers.block_pool import BLOCK_SIZE
from workers.request import FinishReason, Request, RequestOutput
from workers.request_factory import make_request
from workers.simulated_runner import SimulatedRunner
from workers.sketch_beat import SketchBeat

TOKEN_ID, EOS_TOKEN_ID = 2, 1


@dataclass(frozen=True, slots=True)
class Ended:
    """A request ended here: `flight` had `num_cached_tokens` of its prompt found."""

    flight: Flight
    request: Request
    reason: FinishReason
    error: str


class _Look(NamedTuple):
    """How it was when a step ended; all but `free_blocks` by class."""

    num_running: tuple[int, ...]
    num_waiting: tuple[int, ...]
    own_blocks: tuple[int, ...]
    free_blocks: int


class SimulatedWorker:
    """One run of one worker. `call_at(time)` asks for `on_step_end` then; a later call replaces it.

    `on_ended` is told what ended, at the time when it did. With `leap`, steps that only decode are collapsed.
    """

    def __init__(
        self,
        slot: int,
        epoch: int,
        model: Model,
        workers: Workers,
        measures: Measures,
        call_at: Callable[["SimulatedWorker", float], None],
        on_ended: Callable[["SimulatedWorker", list[Ended], float], None],
        handoffs: Handoffs | None = None,
        *,
        leap: bool,
    ) -> None:
        self.slot, self.epoch = slot, epoch
        self.next_event_at = float("inf")
        self.costs = step_costs(model, workers)
        self._model, self._workers = model, workers
        self._measures = measures
        self._gaps = measures.gaps_of(workers.model)
        self._call_at, self._on_ended = call_at, on_ended
        self._leap = leap
        self._runner = SimulatedRunner(vocab_size=TOKEN_ID + 1, roofline=self.costs)
        self.scheduler = make_scheduler(model, workers, self.costs, EOS_TOKEN_ID)
        self._inbox: deque[tuple[Request, int | None]] = deque()
        self._posted: deque[Callable[[float], None]] = deque()
        self._is_dead = False
        self.handoffs: WorkerHandoffs | None = None
        if handoffs is not None:
            kv_bytes = self.costs.bytes_per_block / BLOCK_SIZE
            self.handoffs = WorkerHandoffs(
                handoffs,
                self.scheduler,
                kv_bytes,
                EOS_TOKEN_ID,
                self._post,
                self._take_over,
                self._take_whole,
            )
        self._flights: dict[bytes, Flight] = {}
        self._num_output_tokens: dict[bytes, int] = {}
        self._read_offsets = [0] * len(PriorityClass)
        self._step: tuple[SchedulerOutput, float] | None = None
        self._run: DecodeRun | None = None
        self._run_at = 0.0
        self._look = self._see()
        self._sketch_beat = SketchBeat()

    # Events

    def dispatch(
        self, dispatch: Dispatch, flight: Flight, offset: int, now: float, handoff: Handoff | None = None
    ) -> None:
        """A dispatch that was read from `offset` of its mailbox partition. `handoff`: of its prompt alone."""
        if handoff is None:
            request = make_request(dispatch, is_valid=True)
        else:
            assert self.handoffs is not None
            request = self.handoffs.computes(handoff)
        self._flights[request.request_id] = flight
        self._inbox.append((request, offset))
        self._wake(now)

    def _post(self, call: Callable[[float], None], now: float) -> None:
        """Has the engine call it between two steps."""
        if not self._is_dead:
            self._posted.append(call)
            self._wake(now)

    def _wake(self, now: float) -> None:
        if self._run is not None:
            self._run.cut(now)
            self._announce(self._run.ends[-1])
        elif self._step is None:
            self._begin(now)

    def on_step_end(self, now: float) -> None:
        self.next_event_at = float("inf")
        if self._run is not None:
            self._carry_out(len(self._run.ends), now)
        elif self._step is not None:
            batch, seconds = self._step
            self._step = None
            tokens = self._sample(batch)
            if self.handoffs is not None:
                self.handoffs.on_step(batch, tokens, now - seconds, now)
            outputs = self.scheduler.update_from_output(batch, RunnerOutput(tokens))
            self.scheduler.observe(batch, seconds)
            self._measures.num_steps += 1
            self._tell(outputs, now)
        self._begin(now)

    def status(self, now: float) -> WorkerStatus:
        """What its heartbeat says."""
        if self._run is not None and (num_over := bisect_right(self._run.ends, now)):
            # The last one may end requests: that is for `on_step_end`, at its own time.
            self._carry_out(min(num_over, len(self._run.ends) - 1), now)
        look = self._see() if self._run is not None else self._look
        num_running = sum(look.num_running)
        # In a leap each request lacks one token.
        uncomputed = look.num_running if self._run is not None else self.scheduler.num_uncomputed_tokens()
        pool, meter = self.scheduler.kv_cache_manager.pool, self.scheduler.meter
        handoffs = self.handoffs
        num_running += 0 if handoffs is None else handoffs.num_kept
        return WorkerStatus(
            model=self._workers.model,
            max_model_len=self._model.max_model_len,
            draining=False,
            num_blocks=pool.num_blocks,
            free_blocks=look.free_blocks,
            block_size=pool.block_size,
            max_num_seqs=self.scheduler.config.max_num_seqs,
            num_running=num_running,
            num_waiting=list(look.num_waiting),
            queued_prefill_tokens=sum(uncomputed),
            mailbox_offsets=list(self._read_offsets),
            step_age_ms=0,
            step_time_ms=meter.step_s * 1000,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_tokens_per_s=meter.decode_tokens_per_s,
            canary="ok",
            prefix_sketch=self._sketch(now),
            by_class=list(map(ClassLoad, look.num_running, look.own_blocks, uncomputed)),
            num_gpus=self._workers.tensor_parallel,
            worker_role=self._workers.role,
            kv_layout=kv_layout(self._model, self._workers),
            transfer_bytes_per_s=0.0 if handoffs is None else self._workers.transfer_gb_s * 1e9,
            handoffs=[] if handoffs is None else handoffs.told(now),
        )

    def die(self, now: float) -> list[tuple[Request, list[int]]]:
        """Ends this run; the requests that were here, each with its output so far."""
        self.finish(now)
        self._is_dead = True
        here = [*self.scheduler.requests, *(request for request, _ in self._inbox)]
        return [(request, list(request.output_token_ids)) for request in here]

    def finish(self, now: float) -> None:
        """Nothing comes any more; brings all that is measured up to date."""
        if self._run is not None:
            self._carry_out(min(bisect_right(self._run.ends, now), len(self._run.ends) - 1), now)
            self._close_run()
        kv = self.scheduler.kv_cache_manager
        self._measures.num_prefix_queries += kv.prefix_cache_queries
        self._measures.num_prefix_hits += kv.prefix_cache_hits

    # Inside

    def _begin(self, now: float) -> None:
        """The next step, or leap, if there is anything to do."""
        if self._run is not None:
            if not self._inbox and not self._posted and self._go_on(now):
                return
            self._close_run()
        self._take_inbox(now)
        while True:
            if self._leap and self._can_leap(now):
                self._run = DecodeRun(self.scheduler, self.costs, self._num_left, TOKEN_ID, EOS_TOKEN_ID)
                self._run_at = now
                if self._go_on(now):
                    return
                self._run = None
            self._look = self._see()
            batch = self.scheduler.schedule()
            self._measures.num_preemptions += len(batch.preempted)
            if batch.scheduled or batch.swap_out or batch.swap_in:
                break
            if not batch.preempted:
                return
        seconds = self._runner.step_seconds(batch)
        self._step = batch, seconds
        self._announce(now + seconds)

    def _can_leap(self, now: float) -> bool:
        """Also, all had their last token now: else those that had to stand still have a gap of their own."""
        if not DecodeRun.can_run(self.scheduler):
            return False
        flights = self._flights
        return {flights[request.request_id].last_token_at for request in self.scheduler.running} == {now}

    def _go_on(self, now: float) -> bool:
        run = self._run
        assert run is not None
        if not run.plan(now):
            return False
        self._announce(run.ends[-1])
        return True

    def _carry_out(self, num_steps: int, now: float) -> None:
        """The first `num_steps` planned ones of the leap; tells what ended with the last of them."""
        run, measures = self._run, self._measures
        assert run is not None
        ends = run.ends[:num_steps]
        if measures.token_log is not None:
            for request, position in run.positions():
                number = self._flights[request.request_id].number
                measures.token_log += [(number, position + i, at) for i, at in enumerate(ends)]
        if ends:
            gaps = [at - last for last, at in zip([self._run_at, *ends], ends, strict=False)]
            for log, num_seqs in zip(self._gaps, run.num_by_class, strict=True):
                if num_seqs:
                    log.extend(ends, gaps, num_seqs)
            self._run_at = ends[-1]
        measures.num_steps += len(ends)
        measures.num_steps_leapt += len(ends)
        if ended := run.carry_out(num_steps):
            for request in ended:
                self._catch_up(request)
            self._report([self._ended(request, request.finish_reason) for request in ended], now)

    def _close_run(self) -> None:
        run = self._run
        assert run is not None
        self._run = None
        run.close()
        for request in self.scheduler.running:
            self._catch_up(request)

    def _catch_up(self, request: Request) -> None:
        """The flight of a request that was in the leap knows of its tokens."""
        flight = self._flights[request.request_id]
        flight.num_tokens, flight.last_token_at = len(request.output_token_ids), self._run_at

    def _take_over(self, request: Request, flight: Flight, now: float) -> None:
        """A request whose prompt another worker computed runs here now, with its first token."""
        self._flights[request.request_id] = flight
        self._num_output_tokens[request.request_id] = min(
            flight.arrival.num_output_tokens, request.max_output_tokens
        )
        position = len(request.output_token_ids) - 1
        self._tell([RequestOutput(request, position, request.output_token_ids[position:])], now)

    def _take_whole(self, request: Request, flight: Flight) -> None:
        self._flights[request.request_id] = flight
        self._inbox.append((request, None))

    def _take_inbox(self, now: float) -> None:
        while self._posted:
            self._posted.popleft()(now)
        if self.handoffs is not None:
            self.handoffs.adopt_ready(now)
        inbox = self._inbox
        while inbox:
            request, offset = inbox.popleft()
            if offset is not None:
                self._read_offsets[request.priority] = offset + 1
            outputs = self.scheduler.add_request(request)
            ends = self._flights[request.request_id].arrival.num_output_tokens
            most = request.max_output_tokens
            if self.handoffs is not None:
                most = self.handoffs.max_tokens(request) or most
            self._num_output_tokens[request.request_id] = min(ends, most)
            self._tell(outputs, now)

    def _tell(self, outputs: list[RequestOutput], now: float) -> None:
        if self.handoffs is not None:
            outputs = self._own_outputs(self.handoffs, outputs, now)
        flights, measures = self._flights, self._measures
        token_log = measures.token_log
        together: dict[tuple[PriorityClass, float], int] = {}
        ended: list[Ended] = []
        for output in outputs:
            request = output.request
            flight = flights[request.request_id]
            if output.token_ids:
                if flight.first_token_at is None:
                    flight.first_token_at = now
                else:
                    key = request.priority, flight.last_token_at
                    together[key] = together.get(key, 0) + 1
                if token_log is not None:
                    token_log.append((flight.number, flight.num_tokens, now))
                flight.num_tokens += 1
                flight.last_token_at = now
            if output.finish_reason is not None:
                ended.append(self._ended(request, output.finish_reason, output.error))
        for (priority, last), num_seqs in together.items():
            self._gaps[priority].add(now, now - last, num_seqs)
        if ended:
            self._report(ended, now)

    def _own_outputs(
        self, handoffs: WorkerHandoffs, outputs: list[RequestOutput], now: float
    ) -> list[RequestOutput]:
        """Those that are told here; an error is, wherever the request was to go."""
        own = []
        for output in outputs:
            request = output.request
            if output.finish_reason is FinishReason.ERROR:
                handoffs.ends_here(request, now)
            if handoffs.is_for_another(request):
                if output.finish_reason is not None:
                    del self._flights[request.request_id], self._num_output_tokens[request.request_id]
            elif output.finish_reason is not FinishReason.SUPERSEDED:
                own.append(output)
        return own

    def _report(self, ended: list[Ended], now: float) -> None:
        for end in ended:
            # A higher attempt may have come here meanwhile.
            if end.reason is not FinishReason.SUPERSEDED:
                del self._flights[end.request.request_id], self._num_output_tokens[end.request.request_id]
        self._on_ended(self, ended, now)

    def _ended(self, request: Request, reason: FinishReason | None, error: str = "") -> Ended:
        assert reason is not None
        return Ended(self._flights[request.request_id], request, reason, error)

    def _sample(self, batch: SchedulerOutput) -> list[int | None]:
        tokens: list[int | None] = []
        num_output_tokens = self._num_output_tokens
        for sequence in batch.scheduled:
            if not sequence.samples:
                tokens.append(None)
                continue
            request = sequence.request
            is_last = len(request.output_token_ids) + 1 == num_output_tokens[request.request_id]
            tokens.append(EOS_TOKEN_ID if is_last else TOKEN_ID)
        return tokens

    def _num_left(self, request: Request) -> int:
        """Tokens that are to come of the request."""
        return self._num_output_tokens[request.request_id] - len(request.output_token_ids)

    def _sketch(self, now: float) -> bytes:
        """Which prefixes are cached, when it is time to say so."""
        kv = self.scheduler.kv_cache_manager
        if kv.prefix_index is None or kv.hasher is None or not self._sketch_beat.is_due(now):
            return b""
        return self._sketch_beat.sketch(kv.prefix_index.keys(), shared=kv.hasher.is_shared, now=now)

    def _see(self) -> _Look:
        scheduler = self.scheduler
        running, kv = scheduler.running, scheduler.kv_cache_manager
        return _Look(
            running.len_by_class(),
            scheduler.num_waiting_by_class(),
            running.own_blocks_by_class(),
            kv.num_free_blocks,
        )

    def _announce(self, at: float) -> None:
        self.next_event_at = at
        self._call_at(self, at)
