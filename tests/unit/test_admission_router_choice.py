"""The router's choice is that of a full scan by the plain definitions, whatever came before."""

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.prefix_sketch import DEPTHS, SKETCH_BYTES, holds, is_shared, make_sketch, prefix_keys
from schemas.priority import PriorityClass
from schemas.records import ClassLoad, InferenceRequest
from streams.admission.affinity import PromptPrefix, rendezvous
from streams.admission.fair_queue import QueuedRequest
from streams.admission.in_flight import InFlight
from streams.admission.room import Room
from streams.admission.router import NEAR, Blocked, Router, RoutingPolicy, is_suspect, score
from streams.admission.shares import Share
from streams.admission.worker import PREFILL_SCALE, Worker
from tests.admission_harness import MODEL, make_request
from tests.unit.test_admission_router import member

PROMPTS = [[first, *range(200)] for first in range(3)]
SKETCHES = [b""] + [
    make_sketch(
        [key for n in some for key in prefix_keys(PROMPTS[n], "" if shared else "demo")], shared=shared
    )
    for some in ([], [0], [0, 1], [2])
    for shared in (False, True)
]


def seqs_of(worker: Worker) -> int:
    status = worker.status
    told = status.num_running + sum(status.num_waiting) - sum(worker.ended_seqs)
    return max(0, told + worker.in_flight_seqs + worker.unseen_seqs)


def free_blocks_of(worker: Worker) -> int:
    status, taken = worker.status, worker.in_flight_blocks
    if worker.unseen_seqs and worker.in_flight_seqs:
        taken += taken * worker.unseen_seqs // worker.in_flight_seqs
    told = (
        status.free_blocks - -(-status.queued_prefill_tokens // status.block_size) + sum(worker.ended_blocks)
    )
    return min(status.num_blocks, told - taken)


def load_of(worker: Worker) -> float:
    status = worker.status
    in_flight = [entry.prefill_tokens for entries in worker.in_flight for entry in entries]
    return (
        1.0
        - free_blocks_of(worker) / status.num_blocks
        + seqs_of(worker) / status.max_num_seqs * worker.step_slowness
        + (status.queued_prefill_tokens + sum(in_flight)) / PREFILL_SCALE * worker.prefill_slowness
    )


def cached_of(worker: Worker, prefix: PromptPrefix | None) -> int:
    sketch, found = worker.status.prefix_sketch, 0
    if prefix is None or len(sketch) != SKETCH_BYTES:
        return 0
    for key, depth in zip(prefix.keys(is_shared(sketch)), DEPTHS, strict=False):
        if not (holds(sketch, key) or key in worker.sent):
            break
        found = depth
    return found


def room_at(worker: Worker, request: InferenceRequest, share: Share | None) -> Room:
    """What it says, which must be what `num_seqs` and `free_blocks` say."""
    room, blocks = worker.room(request, 16, share), worker.blocks_for(request, 16)
    is_free = seqs_of(worker) < worker.status.max_num_seqs and blocks <= free_blocks_of(worker)
    assert room in ((Room.NONE, Room.FREE) if is_free else (Room.NONE, Room.TAKEN))
    return room


def full_scan(
    router: Router, request: InferenceRequest, prefix: PromptPrefix | None, share: Share | None
) -> Worker | Blocked:
    known = prefix if router.policy.affinity else None
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    scores: list[tuple[float, Worker]] = []
    blocked = Blocked.NO_WORKER
    for worker in router.workers(MODEL):
        if worker.slot in request.excluded_slots or worker.epoch in request.lost_epochs:
            continue
        if not worker.fits(request):
            continue
        blocked = Blocked.NO_ROOM
        room = room_at(worker, request, share)
        if room is Room.NONE:
            continue
        cached = cached_of(worker, known)
        points = score(router.policy, load_of(worker), num_tokens, cached, worker.prefill_slowness)
        points += 1e3 if room is Room.TAKEN else 0.0
        if is_suspect(request) and worker.suspects - {request.request_id}:
            points += 1e6
        scores.append((points, worker))
    if not scores:
        return blocked
    best, chosen = min(scores, key=lambda entry: entry[0])
    hint = None if known is None else known.hint
    if hint is not None:
        near = [worker for points, worker in scores if points <= best + NEAR]
        chosen = max(near, key=lambda worker: rendezvous(hint, worker.slot))
    return chosen


NONE = ClassLoad(0, 0, 0)
# Mostly alike, so that scores are near and equal too.
STATUS: dict[str, list[Any]] = {
    "num_running": [20, 20, 20, 21, 38, 40],
    "num_waiting": [[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 0, 1]],
    "free_blocks": [55, 55, 55, 56, 5, 0],
    "num_blocks": [60, 60, 60, 10],
    "queued_prefill_tokens": [20, 20, 20, 50, 500, 3_000],
    "step_time_ms": [10.0, 10.0, 10.0, 0.0, 40.0],
    "prefill_tokens_per_s": [3_000.0, 3_000.0, 3_000.0, 0.0, 1_000.0, 20_000.0],
    "prefix_sketch": SKETCHES,
    "max_model_len": [8_192, 8_192, 8_192, 100],
    "by_class": [
        [ClassLoad(20, 5, 20), NONE, NONE],
        [ClassLoad(10, 3, 20), ClassLoad(10, 2, 0), NONE],
        [ClassLoad(2, 1, 2), NONE, ClassLoad(18, 50, 500)],
    ],
}
REQUEST: dict[str, list[Any]] = {
    "prompt_token_ids": [*PROMPTS, *PROMPTS, [1] * 10, [1] * 90],
    "priority": [0, 0, 1, 2],
    "attempt": [1, 1, 2, 3],
    "excluded_slots": [[], [], [], [0], [1, 2]],
    "lost_epochs": [[], [], [], [11]],
    "affinity": [None, None, 5, 6],
}
SHARES = [None, None, Share(0, 1, 2), Share(3, 1, 4)]


def draw(random: Random, choices: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: random.choice(values) for name, values in choices.items()}


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 64))
def test_the_choice_is_that_of_a_full_scan(seed: int) -> None:
    random = Random(seed)
    router = Router(RoutingPolicy(random.random() < 0.8, random.choice([0.0, 0.1, 1.0, 4.0])))
    beats = {slot: draw(random, STATUS) for slot in range(random.randint(2, 8))}
    ends = [[0, 0, 0] for _ in beats]
    sent: list[tuple[Worker, InFlight]] = []

    def beat() -> None:
        router.update(
            member(slot, 10 + slot % 3, max_num_seqs=40, mailbox_offsets=list(ends[slot]), **status)
            for slot, status in beats.items()
        )

    beat()
    for _ in range(random.randint(1, 12)):
        match random.choice(["send", "send", "send", "beat", "ack", "end", "fail"]):
            case "beat":
                beats[random.randrange(len(beats))] = draw(random, STATUS)
                beat()
            case "ack" if sent:
                worker, entry = sent.pop(random.randrange(len(sent)))
                mailbox = ends[worker.slot]
                offset = mailbox[entry.priority] + random.randint(0, 2)  # others send there too
                mailbox[entry.priority] = offset + random.randint(0, 1)
                worker.acked(entry, offset)
            case "fail" if sent:
                worker, entry = sent.pop()
                worker.remove(entry)
            case "end":
                slot = random.randrange(len(beats))
                router.ended(slot, 10 + slot % 3, random.randrange(3), 40)
        request, share = make_request(**draw(random, REQUEST)), random.choice(SHARES)
        prefix = PromptPrefix(request) if random.random() < 0.8 else None
        for worker in router.workers(MODEL):
            assert worker.num_seqs == seqs_of(worker)
            assert worker.free_blocks == free_blocks_of(worker)
            assert worker.load == load_of(worker)
            assert all(worker.lower(p) == worker._count_lower(p) for p in PriorityClass)  # kept, and anew
        chosen = router.choose(request, 16, prefix, share)
        assert chosen is full_scan(router, request, prefix, share)
        item = QueuedRequest(request, 0, 0, 50, 16, 0, 0)
        rooms = {w: room_at(w, request, None) for w in router.workers(MODEL) if w.fits(request)}
        best_room = max(rooms.values(), default=Room.NONE)
        least_loaded = sorted((w for w in rooms if rooms[w] is best_room is not Room.NONE), key=load_of)
        assert router.candidates(item, 2) == least_loaded[:2]
        if isinstance(chosen, Worker):
            sent.append((chosen, router.dispatch(chosen, request, 16, prefix)))
