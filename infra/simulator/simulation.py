"""A fleet in virtual time: the admission service's decisions, workers, and owners that retry.

Events in order of time; of those at one time, ends of steps come first, then records, then clocks. Admission
is fed as its service feeds it: requests and usage rows as they come, heartbeats in a batch every 100 ms.
"""

import gc
import heapq
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from infra.simulator.admission_driver import AdmissionDriver, milliseconds
from infra.simulator.backlog import BacklogCoordinator
from infra.simulator.handoffs import Handoff, Handoffs
from infra.simulator.measures import Flight, Measures, Sample
from infra.simulator.scenario import Failure, Model, Scenario, Workers, kv_layout
from infra.simulator.worker import SimulatedWorker
from infra.simulator.worker_flights import TOKEN_ID, Ended
from infra.simulator.workload import Arrival, arrivals
from schemas.fleet import HEARTBEAT_INTERVAL_S
from schemas.handoff_records import WorkerRole
from schemas.records import Dispatch, Heartbeat, InferenceRequest, Pairing, Rejected, Usage
from streams.admission.actions import Action, Assign, Reply

_STEP, _RECORD, _CLOCK = range(3)
_MAX_LOSSES = 3
# After the last arrival, for what still runs.
_MAX_DRAIN_S = 3_600.0


class Simulation:
    """One run of a scenario. `leap`: collapse steps that only decode; the outcome is the same.

    `log_tokens`, `record`: the measures get every token; every decision and usage row. `asked`: these arrive,
    by time, and not the scenario's traffic. `admission` None: one with the scenario's `policy`.
    """

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        *,
        leap: bool = True,
        log_tokens: bool = False,
        record: bool = False,
        asked: Iterable[Arrival] | None = None,
        admission: AdmissionDriver | None = None,
    ) -> None:
        self.measures = Measures(token_log=[] if log_tokens else None, record=[] if record else None)
        self.now = 0.0
        self._scenario = scenario
        self._leap = leap
        self._hop_s = scenario.delays.hop_ms / 1000
        self._read_s = scenario.delays.heartbeat_read_ms / 1000
        self._events: list[tuple[float, int, int, int, Callable[[], None]]] = []
        self._num_events = 0
        self._arrivals = arrivals(scenario, folder) if asked is None else iter(asked)
        self._admission = admission or AdmissionDriver(scenario, log_decisions=record)
        self._slots: list[tuple[Model, Workers]] = [
            (scenario.models[workers.model], workers)
            for workers in scenario.fleet
            for _ in range(workers.count)
        ]
        self._workers: dict[int, SimulatedWorker] = {}
        self._mailbox_ends: dict[tuple[int, int], int] = {}
        self._flights: dict[bytes, Flight] = {}
        self._num_online = 0
        # What its owner takes to run in each run, and what it has of it, by the run's epoch.
        self._bound: dict[int, dict[bytes, InferenceRequest]] = {}
        self._delivered: dict[bytes, list[int]] = {}
        self._silent: list[tuple[int, int]] = []
        self._backlogs: dict[str, BacklogCoordinator] = {}
        self._handoffs: Handoffs | None = None
        if any(workers.role is not WorkerRole.UNIFIED for workers in scenario.fleet):
            self._handoffs = Handoffs(self.measures, self._hop_s, self._call)

    def run(self) -> Measures:
        """Raises ValueError for a bad line of a trace."""
        scenario = self._scenario
        for slot in range(len(self._slots)):
            self._start(slot)
        for failure in scenario.failures:
            self._at(failure.at, _CLOCK, partial(self._fail, failure))
        for name, backlog in scenario.backlogs.items():
            self._backlogs[name] = BacklogCoordinator(name, backlog, scenario.seed, self._send)
            self._at(backlog.at, _CLOCK, partial(self._fill, name))
        self._beat()
        self._next_arrival()
        events = self._events
        # Requests are many and no cycles: the collector would only pass over them again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            # A moment is carried out whole: a leap knows no order of what ends at the same time elsewhere.
            while events and (not self._is_over() or events[0][0] == self.now):
                event = heapq.heappop(events)
                self.now = event[0]
                event[4]()
        finally:
            if collecting:
                gc.enable()
        for worker in self._workers.values():
            worker.finish(self.now)
        self.measures.ended_at = self.now
        self._record()
        return self.measures

    def _is_over(self) -> bool:
        late = self.now - self._scenario.duration
        return late >= 0 and (not self._num_online or late > _MAX_DRAIN_S)

    def _at(self, at: float, kind: int, call: Callable[[], None], order: int = 0) -> None:
        """`order` of events of a kind at one time, where it must not be that of their announcements."""
        self._num_events += 1
        heapq.heappush(self._events, (at, kind, order, self._num_events, call))

    def _call(self, at: float, call: Callable[[], None]) -> None:
        self._at(max(self.now, at), _RECORD, call)

    def _after_hop(self, call: Callable[[], None], num_hops: int = 1) -> None:
        self._at(self.now + num_hops * self._hop_s, _RECORD, call)

    # Requests

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._at(max(self.now, arrival.at), _CLOCK, partial(self._arrive, arrival))

    def _arrive(self, arrival: Arrival) -> None:
        self._num_online += 1
        self._send(arrival)
        self._next_arrival()

    def _send(self, arrival: Arrival) -> None:
        number = len(self.measures.flights)
        flight = Flight(number, arrival)
        self.measures.flights.append(flight)
        request = arrival.request(number, milliseconds(self.now))
        self._flights[request.request_id] = flight
        self._after_hop(partial(self._ask, request))

    def _ask(self, request: InferenceRequest) -> None:
        self._carry_out(self._admission.on_request(request, self.now))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Assign):
                self._after_hop(partial(self._deliver, action))
            elif isinstance(action, Reply) and isinstance(action.record, Rejected):
                self._refused(action.record)

    def _deliver(self, assign: Assign) -> None:
        """The dispatch is acked, and its worker reads it."""
        dispatch = assign.dispatch
        request, slot = dispatch.request, dispatch.slot
        mailbox = slot, request.priority
        offset = self._mailbox_ends.get(mailbox, 0)
        self._mailbox_ends[mailbox] = offset + 1
        self._carry_out(self._admission.on_dispatched(assign, offset))
        flight = self._flights[request.request_id]
        flight.slot, flight.epoch, flight.attempt = slot, dispatch.epoch, request.attempt
        if flight.dispatched_at is None:
            flight.dispatched_at = self.now
        if dispatch.pairing is not None:
            self._deliver_to_both(dispatch, dispatch.pairing, flight, offset)
            return
        if dispatch.epoch not in self._bound:  # its owner knows already that the run is lost
            self._retry(request, dispatch.epoch)
            return
        self._bound[dispatch.epoch][request.request_id] = request
        worker = self._workers.get(slot)
        if worker is not None and worker.epoch == dispatch.epoch:
            worker.dispatch(dispatch, flight, offset, self.now)

    def _deliver_to_both(self, dispatch: Dispatch, pairing: Pairing, flight: Flight, offset: int) -> None:
        """Its owner is bound to decode's run, and retries as well while it has heard of prefill's alone."""
        request, handoffs = dispatch.request, self._handoffs
        flight.slot, flight.epoch = pairing.decode_slot, pairing.decode_epoch
        assert handoffs is not None
        for epoch in (pairing.decode_epoch, dispatch.epoch):
            if epoch not in self._bound:
                self._retry(request, epoch)
                return
        prefill, decode = self._workers.get(dispatch.slot), self._workers.get(pairing.decode_slot)
        if prefill is None or prefill.epoch != dispatch.epoch:
            self._bound[dispatch.epoch][request.request_id] = request
            return
        self._bound[pairing.decode_epoch][request.request_id] = request
        if decode is None or decode.epoch != pairing.decode_epoch:
            return
        assert prefill.handoffs is not None
        assert decode.handoffs is not None
        runs = dispatch.epoch, pairing.decode_epoch
        handoff = Handoff(dispatch, flight, *runs, prefill.handoffs, decode.handoffs, TOKEN_ID)
        handoffs.begin(handoff, self.now)
        prefill.dispatch(dispatch, flight, offset, self.now, handoff)

    def _refused(self, record: Rejected) -> None:
        flight = self._flights[record.request_id]
        backlog = self._backlogs.get(flight.arrival.traffic)
        if record.attempt > 1:
            flight.failed = record.code
        else:
            flight.refused, flight.refused_status = record.code, record.status
        self._close(flight, record.request_id)
        if backlog is not None and record.attempt == 1:
            backlog.refused(flight.arrival)
            again_at = self.now + (record.retry_after_ms or 1_000) / 1000
            self._at(again_at, _CLOCK, partial(self._fill, flight.arrival.traffic))

    def _fill(self, name: str) -> None:
        self._backlogs[name].fill(self.now)

    def _close(self, flight: Flight, request_id: bytes) -> None:
        flight.ended_at = self.now
        del self._flights[request_id]
        self._delivered.pop(request_id, None)
        if flight.arrival.traffic not in self._backlogs:
            self._num_online -= 1

    # Workers

    def _start(self, slot: int) -> None:
        model, workers = self._slots[slot]
        epoch = self._admission.start_worker(slot)
        self._bound[epoch] = {}
        layout = kv_layout(model, workers)
        handoffs = None if layout is None else self._handoffs
        if handoffs is not None and layout is not None:
            handoffs.add_worker(epoch, workers.transfer_gb_s * 1e9, layout.num_layers)
        self._workers[slot] = SimulatedWorker(
            slot,
            epoch,
            model,
            workers,
            self.measures,
            self._call_at,
            self._on_ended,
            handoffs,
            leap=self._leap,
        )

    def _call_at(self, worker: SimulatedWorker, at: float) -> None:
        # A leap announces its end sooner than its last step would.
        self._at(at, _STEP, partial(self._on_step_end, worker, at), worker.slot)

    def _on_step_end(self, worker: SimulatedWorker, at: float) -> None:
        # A leap that was cut has announced another time; a worker that died has none.
        if worker.next_event_at == at and self._workers.get(worker.slot) is worker:
            worker.on_step_end(at)

    def _on_ended(self, worker: SimulatedWorker, ended: list[Ended], at: float) -> None:
        rows = []
        for end in ended:
            request, flight = end.request, end.flight
            self._unbind(request.request_id, worker.epoch)
            flight.num_cached_tokens = request.num_cached_tokens
            if end.error:
                flight.failed = end.error
            rows.append(
                Usage(
                    request.request_id,
                    request.attempt,
                    False,
                    request.tenant,
                    request.priority,
                    flight.arrival.model,
                    len(request.prompt_token_ids),
                    request.num_cached_tokens,
                    len(request.output_token_ids),
                    end.reason,
                    milliseconds(flight.arrival.at),
                    milliseconds(at),
                    worker.slot,
                    worker.epoch,
                    first_token_ms=flight.first_token_ms,
                )
            )
            self._close(flight, request.request_id)
            if backlog := self._backlogs.get(flight.arrival.traffic):
                backlog.ended(self.now)
        self._record(rows)
        # Tokens are acked before the usage row is sent.
        self._after_hop(partial(self._on_usage, rows), 2)

    def _on_usage(self, rows: list[Usage]) -> None:
        self._carry_out(self._admission.on_usage(rows, self.now))

    def _beat(self) -> None:
        heartbeats = []
        kv_use: dict[int, float] = {}
        num_running = 0
        for slot, worker in self._workers.items():
            status = worker.status(self.now)
            kv_use[slot] = 1 - status.free_blocks / status.num_blocks
            num_running += status.num_running
            heartbeats.append(Heartbeat("worker", slot, worker.epoch, bytes(8), worker=status))
        self.measures.samples.append(Sample(self.now, kv_use, num_running, self._admission.num_queued()))
        read_at = self.now + self._hop_s + self._read_s
        self._at(read_at, _RECORD, partial(self._on_heartbeats, heartbeats, self.now))
        self._at(self.now + HEARTBEAT_INTERVAL_S, _CLOCK, self._beat)

    def _on_heartbeats(self, heartbeats: list[Heartbeat], sent_at: float) -> None:
        self._carry_out(self._admission.on_heartbeats(heartbeats, sent_at, self.now))
        for slot, epoch in [run for run in self._silent if self._admission.is_gone(*run)]:
            self._silent.remove((slot, epoch))
            self._lose(epoch)
        self._record()

    def _record(self, rows: Iterable[Usage] = ()) -> None:
        record = self.measures.record
        if record is not None:
            record += self._admission.decisions()
            record += rows

    # Failures

    def _fail(self, failure: Failure) -> None:
        worker = self._workers.pop(failure.slot, None)
        if failure.back_at is not None:
            self._at(failure.back_at, _CLOCK, partial(self._start, failure.slot))
        if worker is None:
            return
        for request, output_token_ids in worker.die(self.now):
            self._delivered[request.request_id] = output_token_ids
        if failure.silent:
            self._silent.append((worker.slot, worker.epoch))
        else:
            self._after_hop(partial(self._on_left, worker.slot, worker.epoch))

    def _on_left(self, slot: int, epoch: int) -> None:
        self._carry_out(self._admission.on_left(slot, epoch, self.now))
        self._lose(epoch)

    def _unbind(self, request_id: bytes, epoch: int) -> None:
        """It ended in that run, which may have been asked for its prompt only."""
        if self._bound[epoch].pop(request_id, None) is None and self._handoffs is not None:
            for bound in self._bound.values():
                bound.pop(request_id, None)

    def _lose(self, epoch: int) -> None:
        if self._handoffs is not None:
            self._handoffs.lost(epoch, self.now)
        for request in self._bound.pop(epoch).values():
            self._retry(request, epoch)

    def _retry(self, request: InferenceRequest, epoch: int) -> None:
        """What the owner of a request does whose run is lost."""
        flight = self._flights[request.request_id]
        flight.num_losses += 1
        self.measures.num_retries += 1
        if flight.num_losses > _MAX_LOSSES:
            flight.failed = "worker_lost"
            self._close(flight, request.request_id)
            return
        again = replace(
            request,
            attempt=request.attempt + 1,
            output_token_ids=self._delivered.get(request.request_id, request.output_token_ids),
            lost_epochs=[*request.lost_epochs, epoch],
        )
        self._after_hop(partial(self._ask, again))
