"""Any mix of roles that appear, die and fill: every request gets slots that may run it, places at decode
balance, and nothing waits while a worker stands idle that could serve it. Against workers that know what they
have."""

import random
from dataclasses import dataclass, field, replace

import pytest

from schemas.codec import decode, encode
from schemas.handoff_records import WorkerRole
from schemas.records import (
    Dispatch,
    Dispatched,
    Heartbeat,
    InferenceRequest,
    Join,
    KVLayout,
    Left,
    Rejected,
    Usage,
)
from streams.admission.actions import Action, Assign, Reply
from streams.admission.admission import Admission
from streams.admission.decisions import DecisionLog
from streams.admission.splice import encode_dispatch
from streams.admission.waiting import HandoffPolicy, WaitingPolicy
from tests.admission_harness import MODEL, make_request, make_status, make_tenant

LAYOUTS = (KVLayout(16, "bfloat16", 1, 32, 8, 128), KVLayout(16, "float16", 1, 32, 8, 128))
NUM_SLOTS = 6
LEASE_MS = 3_000
BLOCK = 16


@dataclass
class Run:
    """A worker that does what it is told. By request_id: blocks of what runs, dispatches that it has not
    read.

    `coming`: handoffs that decode has heard of; `told`: those that came of late.
    """

    slot: int
    epoch: int
    role: WorkerRole
    layout: KVLayout | None
    num_blocks: int
    max_num_seqs: int
    running: dict[bytes, int] = field(default_factory=dict)
    mailbox: list[tuple[int, Dispatch]] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0, 0, 0])
    read: list[int] = field(default_factory=lambda: [0, 0, 0])
    coming: dict[bytes, int] = field(default_factory=dict)
    told: list[bytes] = field(default_factory=list)
    draining: bool = False

    def heartbeat(self) -> Heartbeat:
        held = sum(self.running.values()) + sum(self.coming.values())
        status = make_status(
            num_blocks=self.num_blocks,
            free_blocks=max(0, self.num_blocks - held),
            max_num_seqs=self.max_num_seqs,
            num_running=len(self.running) + len(self.coming),
            mailbox_offsets=list(self.read),
            draining=self.draining,
            worker_role=self.role.value,
            kv_layout=self.layout,
            handoffs=[*self.coming, *self.told],
        )
        return Heartbeat("worker", self.slot, self.epoch, b"", worker=status)


@dataclass
class Place:
    """What is kept at decode, as the test reckons."""

    attempt: int
    prefill: int
    decode: int
    until: int


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        policy = WaitingPolicy(handoff=HandoffPolicy(lease_ms=LEASE_MS))
        self.admission = Admission(policy, DecisionLog())
        self.now, self.timestamp, self.num_events, self.offset = 1_700_000_000_000, 0, 0, 0
        self.runs: dict[int, Run] = {}
        self.unacked: list[Assign] = []
        self.bound: dict[bytes, tuple[InferenceRequest, int]] = {}
        self.places: dict[bytes, Place] = {}
        self.prefills: dict[bytes, int | None] = {}
        self.waiting: dict[bytes, InferenceRequest] = {}
        self.num_handoffs = self.num_ended = self.num_refused = 0
        self.admission.on_assigned(dict.fromkeys(range(6), 0), self.now)
        self.admission.on_tenant("demo", make_tenant(), self.now)

    # What happens

    def join(self, role: WorkerRole | None = None) -> None:
        free = [slot for slot in range(NUM_SLOTS) if slot not in self.runs]
        if not free:
            return
        self.num_events += 1
        slot, epoch = self.random.choice(free), self.num_events
        self.admission.fleet.on_event(Join("worker", slot, b""), epoch)
        role = role or self.random.choice(list(WorkerRole))
        layout = self.random.choice([*LAYOUTS, LAYOUTS[0], LAYOUTS[0], None])
        blocks, seqs = self.random.choice([(40, 2), (200, 4), (1_000, 8)])
        self.runs[slot] = Run(slot, epoch, role, layout, blocks, seqs)
        self.beat()

    def leave(self) -> None:
        if not self.runs:
            return
        run = self.runs.pop(self.random.choice(list(self.runs)))
        self.num_events += 1
        self.admission.fleet.on_event(Left("worker", run.slot, run.epoch, "died"), self.num_events)
        for request_id, place in list(self.places.items()):
            if run.epoch in (place.prefill, place.decode):
                del self.places[request_id]
        self.carry_out(self.admission.fleet_changed(self.now))
        self.lose(run)

    def drain(self) -> None:
        if self.runs:
            self.random.choice(list(self.runs.values())).draining = True
            self.beat()

    def lose(self, run: Run) -> None:
        """Owners try again what was bound to the run; decode, of what a prefill run was to send, computes
        it."""
        for other in self.runs.values():
            for request_id in [i for i in other.coming if self.prefill_of(i) == run.epoch]:
                other.running[request_id] = other.coming.pop(request_id)
                other.told.append(request_id)
        for request_id, (request, epoch) in list(self.bound.items()):
            never_offered = self.prefill_of(request_id) == run.epoch and not any(
                request_id in other.running or request_id in other.coming for other in self.runs.values()
            )
            if epoch == run.epoch or never_offered:
                self.retry(request, run.epoch)

    def retry(self, request: InferenceRequest, lost: int) -> None:
        self.bound.pop(request.request_id, None)
        self.places.pop(request.request_id, None)
        for run in self.runs.values():
            run.coming.pop(request.request_id, None)
            run.running.pop(request.request_id, None)
        again = replace(request, attempt=request.attempt + 1, lost_epochs=[*request.lost_epochs, lost])
        self.send(again)

    def ask(self) -> None:
        tokens = self.random.choice([3, 40, 300, 700])
        priority = self.random.choice([0, 0, 0, 1])
        self.send(
            make_request(
                prompt_token_ids=[1] * tokens, priority=priority, accepted_at=self.now, end_ms=10_000_000
            )
        )

    def send(self, request: InferenceRequest) -> None:
        self.offset += 1
        self.waiting[request.request_id] = request
        self.admission.takeover.accept(request.priority, self.offset)
        record = encode(request)
        self.carry_out(
            self.admission.on_request(request, record, request.priority, self.offset, None, self.now)
        )

    def ack(self) -> None:
        """The oldest Dispatch lies in its mailbox; a few are not taken."""
        if not self.unacked:
            return
        assign = self.unacked.pop(0)
        dispatch, request = assign.dispatch, assign.dispatch.request
        if self.random.random() < 0.05:
            self.places.pop(request.request_id, None)
            self.carry_out(self.admission.on_dispatch_failed(assign, "test", self.now))
            return
        run = self.runs.get(dispatch.slot)
        offset = 0
        if run is not None and run.epoch == dispatch.epoch:
            offset = run.ends[request.priority]
            run.ends[request.priority] += 1
            run.mailbox.append((offset, dispatch))
        pairing = dispatch.pairing
        bound = (
            (dispatch.slot, dispatch.epoch)
            if pairing is None
            else (pairing.decode_slot, pairing.decode_epoch)
        )
        replies = self.admission.on_dispatched(assign, offset)
        assert isinstance(replies[0], Reply)
        told = replies[0].record
        assert isinstance(told, Dispatched)
        assert (told.slot, told.epoch) == bound
        assert told.prefill_epoch == (None if pairing is None else dispatch.epoch)
        self.bound[request.request_id] = (request, bound[1])
        self.prefills[request.request_id] = told.prefill_epoch
        live = {r.epoch for r in self.runs.values()}
        if lost := {bound[1], dispatch.epoch} - live:
            self.retry(request, min(lost))

    def prefill_of(self, request_id: bytes) -> int | None:
        return self.prefills.get(request_id)

    def work(self) -> None:
        """One worker reads its mailbox; what was to be handed over is offered, or comes."""
        if not self.runs:
            return
        run = self.random.choice(list(self.runs.values()))
        while run.mailbox:
            offset, dispatch = run.mailbox.pop(0)
            request, pairing = dispatch.request, dispatch.pairing
            run.read[request.priority] = offset + 1
            if self.bound.get(request.request_id, (None, 0))[0] is not request:
                continue  # an attempt that is over
            blocks = -(-(len(request.prompt_token_ids) + 16) // BLOCK)
            if pairing is None:
                run.running[request.request_id] = blocks
                continue
            decode_run = self.runs.get(pairing.decode_slot)
            if decode_run is not None and decode_run.epoch == pairing.decode_epoch:
                decode_run.coming[request.request_id] = blocks
        for request_id in list(run.coming):
            if self.random.random() < 0.5:
                run.running[request_id] = run.coming.pop(request_id)
                run.told.append(request_id)

    def end(self) -> None:
        busy = [run for run in self.runs.values() if run.running]
        if not busy:
            return
        run = self.random.choice(busy)
        request_id = self.random.choice(list(run.running))
        del run.running[request_id]
        request, _ = self.bound.pop(request_id)
        self.places.pop(request_id, None)
        self.num_ended += 1
        usage = Usage(
            request_id, request.attempt, False, "demo", request.priority, request.model,
            len(request.prompt_token_ids), 0, 16, "length", request.accepted_at, self.now, run.slot,
            run.epoch,
        )  # fmt: skip
        self.carry_out(self.admission.on_usage(usage, self.now))

    def beat(self) -> None:
        """Heartbeats of all, and what they tell admission of handoffs."""
        self.timestamp += 100
        for run in self.runs.values():
            self.admission.fleet.on_heartbeat(run.heartbeat(), self.timestamp)
            run.told = run.told[-4:]
        self.carry_out(self.admission.fleet_changed(self.now))

    def wait(self) -> None:
        self.now += self.random.choice([10, 100, 1_000])
        for request_id, place in list(self.places.items()):
            if place.until <= self.now:
                del self.places[request_id]
        self.carry_out(self.admission.tick(self.now))

    # What must hold

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Assign):
                self.check_assign(action)
                self.unacked.append(action)
            elif isinstance(action, Reply) and isinstance(action.record, Rejected):
                self.num_refused += 1
                self.waiting.pop(action.record.request_id, None)

    def check_assign(self, assign: Assign) -> None:
        dispatch, request = assign.dispatch, assign.dispatch.request
        assert decode(encode_dispatch(dispatch, assign.record)) == dispatch
        self.waiting.pop(request.request_id, None)
        run = self.runs[dispatch.slot]
        assert run.epoch == dispatch.epoch
        assert run.epoch not in request.lost_epochs
        tokens = len(request.prompt_token_ids)
        pairing = dispatch.pairing
        if pairing is None:
            assert tokens + request.sampling.max_tokens <= run.num_blocks * BLOCK + 1
            return
        self.num_handoffs += 1
        target = self.runs[pairing.decode_slot]
        assert target.epoch == pairing.decode_epoch
        assert target.epoch not in request.lost_epochs
        assert (run.role, target.role) == (WorkerRole.PREFILL, WorkerRole.DECODE)
        assert run.layout == target.layout is not None
        assert tokens + 1 <= run.num_blocks * BLOCK + 1
        assert tokens + request.sampling.max_tokens <= target.num_blocks * BLOCK + 1
        place = Place(request.attempt, run.epoch, target.epoch, self.now + LEASE_MS)
        self.places[request.request_id] = place

    def check(self) -> None:
        router = self.admission.router
        assert len(router.reservations) == len(self.places)
        workers = {worker.epoch: worker for worker in router._workers.values()}
        for worker in workers.values():
            assert worker.reserved_blocks == sum(entry.blocks for entry in worker.reserved.values())
            for request_id in worker.reserved:
                assert self.places[request_id].decode == worker.epoch
        for request_id, place in self.places.items():
            worker = workers[place.decode]
            assert request_id in worker.reserved or request_id in worker.status.handoffs
        # Whoever is next of the highest class that waits does so for nothing that an idle worker could do.
        classes = self.admission._backlog.queue(MODEL).classes
        first = next((item for fair in classes if (item := fair.first()) is not None), None)
        if first is None:
            return
        request = first.request
        idle = [
            worker
            for worker in router.workers(MODEL)
            if worker.num_seqs == worker.in_flight_seqs == 0
            and worker.fits(request)
            and worker.epoch not in request.lost_epochs
        ]
        assert not idle, (request.attempt, idle)

    def settle(self) -> None:
        """Whatever happened, one worker more and time bring everything to an end."""
        for run in self.runs.values():
            run.draining = False
        while len(self.runs) == NUM_SLOTS:
            self.leave()
        self.join(WorkerRole.UNIFIED)
        newest = max(self.runs.values(), key=lambda run: run.epoch)
        newest.num_blocks, newest.max_num_seqs = 1_000, 8
        for _ in range(500):
            self.ack()
            self.work()
            self.end()
            self.beat()
            self.check()
        assert not self.waiting
        assert not self.bound
        self.now += LEASE_MS
        self.carry_out(self.admission.tick(self.now))
        self.beat()
        assert len(self.admission.router.reservations) == 0
        for worker in self.admission.router._workers.values():
            assert not worker.reserved
            assert worker.reserved_blocks == worker.num_seqs == 0
            assert worker.free_blocks == worker.status.num_blocks


@pytest.mark.parametrize("seed", range(60))
def test_requests_get_slots_places_balance_and_nothing_waits_in_vain(seed: int) -> None:
    world = World(seed)
    happenings = [
        (world.ask, 10), (world.ack, 10), (world.work, 10), (world.end, 8), (world.beat, 4),
        (world.wait, 2), (world.join, 2), (world.leave, 1), (world.drain, 0.3),
    ]  # fmt: skip
    calls, weights = zip(*happenings, strict=True)
    for role in WorkerRole:
        world.join(role)
    for _ in range(250):
        world.random.choices(calls, weights)[0]()
        world.check()
    world.settle()


def test_the_histories_hold_what_is_to_be_shown() -> None:
    handoffs = ended = refused = 0
    for seed in range(6):
        world = World(seed)
        for role in WorkerRole:
            world.join(role)
        for _ in range(100):
            world.ask()
            world.ack()
            world.work()
            world.end()
            world.beat()
        handoffs, ended = handoffs + world.num_handoffs, ended + world.num_ended
        refused += world.num_refused
    assert handoffs > 20
    assert ended > 200
