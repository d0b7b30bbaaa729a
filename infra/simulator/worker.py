"""A worker in virtual time: the shipped scheduler and block pool on the step times of its GPUs.

It is driven by events: `dispatch` hands a request over, `on_step_end` comes when the step, or the last step
of the leap, that it announced to `call_at` is over. In between its heartbeat tells how it was when the last
step ended, as the engine thread does.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from infra.simulator.decode_run import DecodeRun
from infra.simulator.engine import make_scheduler
from infra.simulator.handoffs import Handoff, Handoffs
from infra.simulator.leap_rules import may_begin
from infra.simulator.measures import Flight, Measures
from infra.simulator.scenario import Model, Workers, step_costs
from infra.simulator.worker_flights import EOS_TOKEN_ID, TOKEN_ID, Ended, WorkerFlights
from infra.simulator.worker_handoffs import WorkerHandoffs
from infra.simulator.worker_heartbeat import WorkerHeartbeat
from schemas.priority import PriorityClass
from schemas.records import Dispatch, WorkerStatus
from workers.batch import SchedulerOutput
from workers.block_pool import BLOCK_SIZE
from workers.request import FinishReason, Request, RequestOutput
from workers.request_factory import make_request
from workers.simulated_runner import SimulatedRunner


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
        self._measures = measures
        self._call_at, self._on_ended = call_at, on_ended
        self._leap = leap
        self._runner = SimulatedRunner(vocab_size=TOKEN_ID + 1, roofline=self.costs)
        self.scheduler = make_scheduler(model, workers, self.costs, EOS_TOKEN_ID)
        self._inbox: deque[tuple[Request, int | None]] = deque()
        self._posted: deque[Callable[[float], None]] = deque()
        self._is_dead = False
        self._flights = WorkerFlights(measures, workers.model)
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
                self._flights.remove,
            )
        self._read_offsets = [0] * len(PriorityClass)
        # The step that is being computed; with a run, it is one beside prompts. A run without one is a leap.
        self._step: tuple[SchedulerOutput, float] | None = None
        self._run: DecodeRun | None = None
        self._heartbeat = WorkerHeartbeat(model, workers, self.scheduler, self.handoffs)
        self._look = self._heartbeat.look()

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
        self._flights.add(request.request_id, flight)
        self._inbox.append((request, offset))
        self._wake(now)

    def _post(self, call: Callable[[float], None], now: float) -> None:
        """Has the engine call it between two steps."""
        if not self._is_dead:
            self._posted.append(call)
            self._wake(now)

    def _wake(self, now: float) -> None:
        if self._step is not None:
            return
        if self._run is None:
            self._begin(now)
        else:
            self._run.cut(now)
            self._announce(self._run.ends[-1])

    def on_step_end(self, now: float) -> None:
        self.next_event_at = float("inf")
        if self._step is not None:
            batch, seconds = self._step
            self._step = None
            if self._run is None:
                self._end_step(batch, seconds, now)
            else:
                self._end_step_beside(self._run, batch, now)
            self.scheduler.observe(batch, seconds)
            self._measures.num_steps += 1
        elif self._run is not None:
            self._carry_out(len(self._run.ends), now)
        self._begin(now)

    def status(self, now: float) -> WorkerStatus:
        """What its heartbeat says."""
        if self._run is None or self._step is not None:
            look, uncomputed = self._look, self.scheduler.num_uncomputed_tokens()
        else:
            self._carry_out_until(now)
            look = self._heartbeat.look()
            uncomputed = look.num_running  # in a leap each request lacks one token
        return self._heartbeat.status(look, uncomputed, self._read_offsets, now)

    def die(self, now: float) -> list[tuple[Request, list[int]]]:
        """Ends this run; the requests that were here, each with its output so far."""
        self.finish(now)
        self._is_dead = True
        here = [*self.scheduler.requests, *(request for request, _ in self._inbox)]
        return [(request, list(request.output_token_ids)) for request in here]

    def finish(self, now: float) -> None:
        """Nothing comes any more; brings all that is measured up to date."""
        if self._run is not None:
            if self._step is None:
                self._carry_out_until(now)
            self._close_run()
        kv = self.scheduler.kv_cache_manager
        self._measures.num_prefix_queries += kv.prefix_cache_queries
        self._measures.num_prefix_hits += kv.prefix_cache_hits

    # Steps

    def _begin(self, now: float) -> None:
        """The next step, or leap, if there is anything to do."""
        has_news = bool(self._inbox or self._posted)
        if self._run is not None:
            if not has_news and self._run.is_alone and self._go_on(now):
                return
            # Handoffs come and go between two steps: they move requests that a run knows.
            if self._posted or self.handoffs is not None:
                self._close_run()
        self._take_inbox(now)
        while True:
            if self._leap and self._leaps(now):
                return
            self._look = self._heartbeat.look()
            batch = self.scheduler.schedule() if self._run is None else self._run.schedule()
            self._measures.num_preemptions += len(batch.preempted)
            if batch.scheduled or batch.swap_out or batch.swap_in:
                break
            if not batch.preempted:
                return
        seconds = self._runner.step_seconds(batch)
        self._step = batch, seconds
        self._announce(now + seconds)

    def _leaps(self, now: float) -> bool:
        """Begins a leap if there can be one. If not, a run that is left goes on beside prompts."""
        if self._run is None:
            scheduler = self.scheduler
            # Handoffs move requests between two steps, beside prompts too.
            if not may_begin(scheduler, beside_prompts=self.handoffs is None):
                return False
            run = DecodeRun(scheduler, self.costs, self._flights.num_left, TOKEN_ID, EOS_TOKEN_ID)
            # Those that had to stand still for some of the steps have gaps of their own.
            if not self._flights.meet(run.groups):
                return False
            self._run = run
        if self._run.is_alone:
            if self._go_on(now):
                return True
            self._close_run()
        elif not self._run.can_step():
            self._close_run()
        return False

    def _go_on(self, now: float) -> bool:
        run = self._run
        assert run is not None
        if not run.plan(now):
            return False
        self._announce(run.ends[-1])
        return True

    def _carry_out_until(self, now: float) -> None:
        """What is over of the leap. Its last step may end requests: that is for `on_step_end`."""
        assert self._run is not None
        ends = self._run.ends
        if num_over := min(bisect_right(ends, now), len(ends) - 1):
            self._carry_out(num_over, now)

    def _carry_out(self, num_steps: int, now: float) -> None:
        """The first `num_steps` planned ones of the leap; tells what ended with the last of them."""
        run, measures = self._run, self._measures
        assert run is not None
        ends = run.ends[:num_steps]
        for group in run.groups:
            self._flights.tell_group(group, ends)
        measures.num_steps += len(ends)
        measures.num_steps_leapt += len(ends)
        if ended := run.carry_out(num_steps):
            self._report([self._ended_in_run(request, ends[-1]) for request in ended], now)

    def _end_step(self, batch: SchedulerOutput, seconds: float, now: float) -> None:
        sampled = self._flights.sample(batch.scheduled)
        if self.handoffs is not None:
            self.handoffs.on_step(batch, sampled.token_ids, now - seconds, now)
        self._tell(self.scheduler.update_from_output(batch, sampled), now)

    def _end_step_beside(self, run: DecodeRun, batch: SchedulerOutput, now: float) -> None:
        """The end of a step that a run took beside prompts."""
        for group in run.stepping:
            self._flights.tell_group(group, [now])
        ended, outputs = run.update_from_output(batch, self._flights.sample(run.chunks(batch)), now)
        self._tell(outputs, now, [self._ended_in_run(request, now) for request in ended])

    def _close_run(self) -> None:
        run = self._run
        assert run is not None
        for request, at in run.close():
            self._flights.catch_up(request, at)
        self._run = None

    def _ended_in_run(self, request: Request, at: float) -> Ended:
        assert request.finish_reason is not None
        return Ended(self._flights.catch_up(request, at), request, request.finish_reason, "")

    # What comes and goes between steps

    def _take_over(self, request: Request, flight: Flight, now: float) -> None:
        """A request whose prompt another worker computed runs here now, with its first token."""
        self._flights.add(request.request_id, flight)
        self._flights.expect(request, request.max_output_tokens)
        position = len(request.output_token_ids) - 1
        self._tell([RequestOutput(request, position, request.output_token_ids[position:])], now)

    def _take_whole(self, request: Request, flight: Flight) -> None:
        self._flights.add(request.request_id, flight)
        self._inbox.append((request, None))

    def _take_inbox(self, now: float) -> None:
        while self._posted:
            self._posted.popleft()(now)
        if self.handoffs is not None:
            self.handoffs.adopt_ready(now)
        inbox = self._inbox
        while inbox:
            request, offset = inbox.popleft()
            if self._run is not None and self._flights.is_expected(request):
                self._close_run()  # the new attempt ends one that may be in it
            if offset is not None:
                self._read_offsets[request.priority] = offset + 1
            outputs = self.scheduler.add_request(request)
            most = request.max_output_tokens
            if self.handoffs is not None:
                most = self.handoffs.max_tokens(request) or most
            self._flights.expect(request, most)
            self._tell(outputs, now)

    def _tell(self, outputs: list[RequestOutput], now: float, ended: Sequence[Ended] = ()) -> None:
        """Tells what is known of `outputs`, and of what `ended` before them in the same step."""
        if self.handoffs is not None:
            outputs = self.handoffs.own_outputs(outputs, now)
        if all_ended := [*ended, *self._flights.tell(outputs, now)]:
            self._report(all_ended, now)

    def _report(self, ended: list[Ended], now: float) -> None:
        for end in ended:
            # A higher attempt may have come here meanwhile.
            if end.reason is not FinishReason.SUPERSEDED:
                self._flights.remove(end.request)
        self._on_ended(self, ended, now)

    def _announce(self, at: float) -> None:
        self.next_event_at = at
        self._call_at(self, at)
