"""A reply partition, the gateways that fold it, admission and workers, without Kafka: driven step by step.

What the driver may do to it: kill or stop gateways, kill workers, let readers come and go, let anyone lag.
"""

import copy
from collections import deque
from dataclasses import dataclass, field

from gateway.actions import Action, Announce, Bill, Cancel, Reply, SendRequest
from gateway.estate import Estate
from gateway.metrics import Timing
from gateway.owner import Owner, reply_partition
from gateway.reader import WholeReader
from gateway.slot_watch import SlotWatch
from schemas.fleet import FleetView
from schemas.records import (
    Attach,
    Cancellation,
    Completion,
    Detach,
    Dispatched,
    Failed,
    Heartbeat,
    InferenceRequest,
    Left,
    Tokens,
    Usage,
)
from schemas.stream_state import ReplyRecord, Run, StreamState
from schemas.token_records import TokenChunk
from tests.gateway_factories import inference_request

RID = bytes(range(16))
SLOT = 1  # of the gateway that accepts the request
PARTITION = reply_partition(SLOT, 0)
GATEWAY_SLOTS = 3
SUCCESSION_MS = 2_000
TOTAL = 8
Record = Tokens | ReplyRecord | Cancellation


def token_at(position: int) -> int:
    return 1000 + position


@dataclass(eq=False)
class WorkerRun:
    """An honest run: it goes on where its request stands. Cancelled, it says so."""

    run: Run
    request: InferenceRequest
    position: int
    alive: bool = True


class Gateway:
    """One life of a gateway process. What it wants done reaches the log at once, in order."""

    def __init__(self, world: "World", slot: int, epoch: int) -> None:
        self.world = world
        self.view = FleetView()
        self.view.watch_as("gateway", slot, epoch)
        self.owner = Owner(slot, epoch, shards=4, cancel_timeout_ms=3_000)
        self.owner.position = lambda partition: self.position
        self.slots = SlotWatch(self.view, slot, epoch, SUCCESSION_MS)
        self.estate = Estate(SLOT, self.owner)
        self.follows = slot == SLOT
        self.position = 0
        self.alive, self.stopped = True, False
        self.num_readers = 0
        self.read_to = 0  # while held

    @property
    def is_me(self) -> tuple[int, int]:
        return self.owner.slot, self.owner.epoch

    def read(self, count: int) -> None:
        """The next records, as service.py and following.py give them."""
        if not self.follows:
            return
        for record in self.world.log[self.position : self.position + count]:
            timestamp = self.world.time
            if isinstance(record, Tokens):
                self.do(self.owner.on_tokens(record, timestamp, 0.0))
            elif isinstance(record, Cancellation):
                self.do(self.owner.on_cancellation(record))
            else:
                self.do(self.owner.on_record(record, timestamp))
            clock = self.view.clock.now_ms
            self.do(self.estate.on_record(record, PARTITION, self.position, timestamp, clock))
            self.position += 1
        if self.owner.held and self.position >= self.read_to:
            self.owner.held = False

    def tick(self) -> None:
        self.do(self.owner.tick(self.view, 2_000, 0.0))
        if self.owner.held:
            return
        fold = self.world.fold()
        if not self.follows and fold.owner_epoch is not None:
            owner_slot = SLOT if fold.owner_slot is None else fold.owner_slot
            read_from_lost = self.num_readers > 0 and self.slots.lost(owner_slot, fold.owner_epoch)
            self.follows = read_from_lost or SLOT in self.slots.to_see_to(GATEWAY_SLOTS)
        self.estate.forget(self.view.clock.now_ms)
        own = self.owner.slot == SLOT
        everything = own or self.slots.is_vacant(SLOT)
        due = self.estate.due(
            self.view,
            read_here={RID} if self.num_readers else set(),
            everything=everything,
            lost=self.slots.lost,
            clock_ms=self.view.clock.now_ms,
        )
        kept_ms = 0 if everything and not own else SUCCESSION_MS
        for found in due:
            assert found.state.request_at is not None
            request = copy.deepcopy(self.world.requests[found.state.request_at[1]])
            self.do(self.estate.take(found, request, self.view.clock.now_ms, kept_ms))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            self.world.carry_out(self, action)


@dataclass(eq=False)
class World:
    log: list[Record] = field(default_factory=list)
    requests: list[InferenceRequest] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)  # sent, not dispatched
    runs: list[WorkerRun] = field(default_factory=list)
    gateways: list[Gateway] = field(default_factory=list)
    bills: list[Usage] = field(default_factory=list)
    misdeeds: list[tuple[tuple[int, int], Action]] = field(default_factory=list)
    time: int = 1_000_000
    num_joins: int = 50
    is_unwanted: bool = False  # an owner has stopped all attempts

    def join(self, slot: int) -> Gateway:
        """A new life; an earlier one of the slot ends when it sees this."""
        self.num_joins += 1
        gateway = Gateway(self, slot, self.num_joins)
        self.gateways.append(gateway)
        return gateway

    def accept(self, detach_ms: int) -> WholeReader:
        first = self.gateways[0]
        request = inference_request(RID, reply_partition=PARTITION, owner_epoch=first.owner.epoch)
        request.detach_ms, request.sampling.max_tokens = detach_ms, TOTAL
        reader = WholeReader("simulated", Timing(), 0.0)
        owned = first.owner.accept(request, reader)
        first.do([SendRequest(owned)])
        return reader

    def fold(self, upto: int | None = None) -> StreamState:
        """The truth: what any reader of the log computes."""
        state = StreamState(RID)
        for record in self.log[:upto]:
            if isinstance(record, Tokens):
                for chunk in record.chunks:
                    state.apply_chunk(Run(record.slot, record.epoch), chunk)
            elif not isinstance(record, Cancellation):
                state.apply(record)
        return state

    def carry_out(self, by: Gateway, action: Action) -> None:
        stray = isinstance(action, Cancel) and action.record.slot is not None
        acts = isinstance(action, SendRequest | Cancel) and not stray
        # Who acts has just read all that there is, or has not been thought dead: it owns the request.
        state = self.fold()
        # A Failed is final: what still runs then may be stopped by whoever bills it.
        stops_for_good = isinstance(action, Cancel) and isinstance(state.end, Failed)
        if acts and not stops_for_good and state.owner_epoch not in (None, by.owner.epoch):
            self.misdeeds.append((by.is_me, action))
        match action:
            case SendRequest(owned):
                self.requests.append(copy.deepcopy(owned.request))
                self.waiting.append(len(self.requests) - 1)
                by.owner.on_sent(owned, len(self.requests) - 1)
            case Reply(record) | Announce(record):
                self.log.append(record)
            case Cancel(cancellation):
                self._cancel(cancellation)
            case Bill(usage):
                self.bills.append(usage)

    def dispatch(self, slot: int) -> None:
        """Admission gives the oldest request that waits to a new run."""
        if not self.waiting:
            return
        offset = self.waiting.popleft()
        request = self.requests[offset]
        self.num_joins += 1
        run = Run(slot, self.num_joins)
        self.runs.append(WorkerRun(run, request, len(request.output_token_ids)))
        self.log.append(Dispatched(RID, request.attempt, request.owner_epoch, *run, "simulated", 0, offset))

    def step(self, worker: WorkerRun, count: int) -> None:
        if not worker.alive:
            return
        end = min(worker.position + count, TOTAL)
        ids = [token_at(p) for p in range(worker.position, end)]
        finish = "length" if end == TOTAL else None
        self.log.append(
            Tokens.of(*worker.run, [TokenChunk(RID, worker.request.attempt, worker.position, ids, finish)])
        )
        worker.position = end
        if finish:
            self._complete(worker, finish)

    def give_up(self, worker: WorkerRun) -> None:
        """It is asked to stop, and hands back what it runs."""
        if worker.alive:
            self._complete(worker, "cancelled")

    def die(self, worker: WorkerRun) -> None:
        """By its parent's word, which all gateways hear."""
        worker.alive = False
        for gateway in self.gateways:
            gateway.view.on_event(Left("worker", *worker.run, "killed by signal 9"), 0)

    def pass_ms(self, duration: int) -> None:
        for _ in range(duration // 100):
            self.time += 100
            up = [g for g in self.gateways if g.alive and not g.stopped]
            for gateway in up:
                for other in up:
                    gateway.view.on_heartbeat(Heartbeat("gateway", *other.is_me, b""), self.time)
                for worker in self.runs:
                    if worker.alive:
                        gateway.view.on_heartbeat(Heartbeat("worker", *worker.run, b""), self.time)
            for worker in self.runs:
                if worker.alive and self.time % 1_000 == 0:
                    self.step(worker, 0)
            for gateway in up:
                newest = gateway.view.epoch_of("gateway", gateway.owner.slot)
                if newest is not None and newest > gateway.owner.epoch:
                    gateway.alive = False  # superseded
                else:
                    gateway.tick()

    @property
    def num_up(self) -> int:
        return sum(g.alive and not g.stopped for g in self.gateways)

    def wake(self, gateway: Gateway) -> None:
        if gateway.stopped:
            gateway.stopped = False
            gateway.owner.held, gateway.read_to = gateway.follows, len(self.log)

    def attach(self, gateway: Gateway) -> None:
        gateway.num_readers += 1
        self.log.append(Attach(RID, *gateway.is_me))

    def detach(self, gateway: Gateway) -> None:
        if gateway.num_readers:
            gateway.num_readers -= 1
            self.log.append(Detach(RID, *gateway.is_me, 0))

    def _complete(self, worker: WorkerRun, reason: str) -> None:
        worker.alive = False
        attempt = worker.request.attempt
        self.log.append(Completion(RID, attempt, *worker.run, 3, 0, worker.position, reason))

    def _cancel(self, cancellation: Cancellation) -> None:
        for worker in self.runs:
            if cancellation.slot is not None and worker.run != (cancellation.slot, cancellation.epoch):
                continue
            if worker.alive and worker.request.attempt <= cancellation.attempt:
                self._complete(worker, "cancelled")
        if cancellation.slot is None:
            self.is_unwanted = self.is_unwanted or cancellation.attempt >= self.fold().attempt
            kept = [o for o in self.waiting if self.requests[o].attempt > cancellation.attempt]
            self.waiting = deque(kept)
