"""Picks the worker for a request, late: only one that has room now (worker.py counts it), be it that lower
classes give way.

The score is a worker's load with the request on it, less what its prefix cache saves. All terms are in the
same unit, so affinity ends by itself where the favourite's queue is longer than the hit is worth; beyond
`max_affinity` a hit counts no more, so that a prefix that all share does not fill one worker first.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, islice, repeat, takewhile
from operator import attrgetter

from schemas.fleet import Member
from schemas.prefix_sketch import is_shared
from schemas.records import InferenceRequest
from streams.admission.affinity import PromptPrefix, cached_tokens_at, rendezvous
from streams.admission.fair_queue import QueuedRequest
from streams.admission.in_flight import InFlight
from streams.admission.room import Room
from streams.admission.shares import Share
from streams.admission.worker import PREFILL_SCALE, Worker, num_tokens

# Scores that differ by less are taken for equal, and requests that belong together go the same way: a
# heartbeat is 100 ms old, in which a busy worker takes about that much (13 of 256 sequences).
NEAR = 0.05
# A worker counts as at most so much slower than the fastest: rates are running means over unlike steps.
MAX_SLOWNESS = 4.0
# What a cached token is worth, in tokens of queue: one that this request need not wait for, and one that the
# worker can compute for another instead. With 1, two workers compute what both had sent at the same time.
HIT_WEIGHT = 2.0
# A whole batch, or 2,048 prompt tokens ahead. In the scenario `shared_prompts` 74 % of all prompt tokens are
# found, 66 % with 0.5 and 57 % without affinity, and time to first token is 110, 134 and 141 ms at p99; the
# hottest worker gets 1.03 times the mean. A higher cap finds no more, in a spike of twice the rate neither.
DEFAULT_MAX_AFFINITY = 1.0
# More than any load: with another suspect only where there is no other room.
_APART = 1e6
# Less than that, and more than any load: lower classes give way where nothing is free.
_PREEMPTS = 1e3
_SUSPECT_ATTEMPT = 3
_load = attrgetter("load")


class Blocked(Enum):
    """Why no worker takes a request now."""

    NO_WORKER = auto()  # none serves the model, or all that do are excluded
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """`affinity`: prefix hits and hints count. `max_affinity`: the load that a hit may outweigh."""

    affinity: bool = True
    max_affinity: float = DEFAULT_MAX_AFFINITY

    def pick(
        self, request: InferenceRequest, rated: Iterator[tuple[float, Worker]], prefix: PromptPrefix | None
    ) -> Worker:
        """Of the workers with room (one at least), by their scores: the best; of those near it the hint's.

        The best come first, and each is asked for room only when it is taken from `rated`.
        """
        best, chosen = next(rated)
        near = [worker for _, worker in takewhile(lambda entry: entry[0] <= best + NEAR, rated)]
        hint = prefix.hint if prefix is not None and near else None
        if hint is not None:
            chosen = max(chosen, *near, key=lambda worker: rendezvous(hint, worker.slot))
        return chosen


def score(policy: RoutingPolicy, load: float, num_tokens: int, cached: int, slowness: float) -> float:
    """What a worker of `load` is to a request of `num_tokens`, `cached` of them there; least is best."""
    per_token = slowness / PREFILL_SCALE
    points = load + num_tokens * per_token
    return points - min(policy.max_affinity, HIT_WEIGHT * cached * per_token) if policy.affinity else points


def is_suspect(request: InferenceRequest) -> bool:
    """Two runs did not end it. It may be what they died of: it is kept apart from another such request, which
    its owner asks for too as far as it knows of them (`excluded_slots`)."""
    return request.attempt >= _SUSPECT_ATTEMPT


class Router:
    """The live workers by model."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self.policy = policy or RoutingPolicy()
        self._workers: dict[int, Worker] = {}
        self._by_model: dict[str, list[Worker]] = {}

    def update(self, members: Iterable[Member]) -> None:
        """Takes the workers that live now; what was in flight to others is forgotten with them."""
        workers: dict[int, Worker] = {}
        for member in members:
            heartbeat = member.heartbeat
            if heartbeat is None or heartbeat.worker is None:
                continue
            worker = self._workers.get(member.slot)
            if worker is None or worker.epoch != member.epoch:
                worker = Worker(
                    member.slot, member.epoch, heartbeat, heartbeat.worker, member.draining, member.heard_at
                )
            elif worker.heartbeat is not heartbeat:
                worker.update(heartbeat, heartbeat.worker, member.heard_at)
            worker.draining = member.draining
            workers[member.slot] = worker
        self._workers = workers
        self._by_model = {}
        for worker in workers.values():
            if worker.takes_requests:
                self._by_model.setdefault(worker.status.model, []).append(worker)
        for same in self._by_model.values():
            _compare(same)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def workers(self, model: str) -> list[Worker]:
        """Those that take requests for the model."""
        return self._by_model.get(model, [])

    def models(self) -> list[str]:
        """Those that some worker takes requests for."""
        return list(self._by_model)

    def kv_use(self, model: str) -> float:
        """The part of the KV blocks of a model's workers that is in use or claimed; 0 without workers."""
        workers = self.workers(model)
        blocks = sum(worker.status.num_blocks for worker in workers)
        return 1.0 - sum(worker.free_blocks for worker in workers) / blocks if blocks else 0.0

    def choose(
        self,
        request: InferenceRequest,
        expected_output_tokens: int,
        prefix: PromptPrefix | None = None,
        share: Share | None = None,
    ) -> Worker | Blocked:
        """The worker with room for the request that has the best score.

        `prefix` None: the cache says nothing. `share` None: all room is this process's. O(workers), a
        microsecond each: all are scored, and from the best on asked for room until one has it.
        """
        policy, priority = self.policy, request.priority
        known = prefix if policy.affinity else None
        whole = num_tokens(request, expected_output_tokens)
        to_compute = whole - expected_output_tokens
        workers = self._by_model.get(request.model, [])
        if request.excluded_slots or request.lost_epochs:
            excluded, lost = request.excluded_slots, request.lost_epochs
            workers = [w for w in workers if w.slot not in excluded and w.epoch not in lost]
        some = [w for w in workers if whole <= w.free_tokens or w.lower(priority) is not None]
        cached = repeat(0) if known is None else cached_tokens_at(some, known)
        scores = [
            (
                score(policy, worker.load, to_compute, tokens, worker.prefill_slowness)
                + (0.0 if whole <= worker.free_tokens else _PREEMPTS),
                index,
            )
            for index, (worker, tokens) in enumerate(zip(some, cached, strict=False))
        ]
        if is_suspect(request):
            own = {request.request_id}
            scores = [(p + _APART if some[i].suspects - own else p, i) for p, i in scores]
        scores.sort()

        def with_room() -> Iterator[tuple[float, Worker]]:
            for points, index in scores:
                worker = some[index]
                if worker.fits(request) and worker.room(request, expected_output_tokens, share):
                    yield points, worker

        rated = with_room()
        first = next(rated, None)
        if first is None:
            return Blocked.NO_ROOM if any(w.fits(request) for w in workers) else Blocked.NO_WORKER
        return policy.pick(request, chain((first,), rated), known)

    def candidates(self, item: QueuedRequest, most: int) -> list[Worker]:
        """The least loaded that have room for it, `most` of them; free room, if there is any."""
        request, expected = item.request, item.expected_output_tokens
        whole = num_tokens(request, expected)
        by_load = sorted(self.workers(request.model), key=_load)
        for room in (Room.FREE, Room.TAKEN):
            fit = (
                worker
                for worker in by_load
                if (whole <= worker.free_tokens) is (room is Room.FREE)
                and worker.fits(request)
                and worker.room(request, expected, None) is room
            )
            if found := list(islice(fit, most)):
                return found
        return []

    def dispatch(
        self,
        worker: Worker,
        request: InferenceRequest,
        expected_output_tokens: int,
        prefix: PromptPrefix | None = None,
    ) -> InFlight:
        """Counts the request at the worker until a heartbeat does."""
        cached = 0
        if prefix is not None and (sketch := worker.status.prefix_sketch):
            cached = worker.cached_tokens(prefix)
            worker.sent.add(prefix.keys(is_shared(sketch)))
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        entry = InFlight(
            priority=request.priority,
            blocks=worker.blocks_for(request, expected_output_tokens),
            prefill_tokens=num_tokens - cached,
            cached_tokens=cached,
        )
        worker.add(entry)
        if is_suspect(request):
            worker.suspects.add(request.request_id)
        return entry

    def billed(self, slot: int, epoch: int, request_id: bytes) -> None:
        """A usage row: the request does no harm to that run any more."""
        worker = self._workers.get(slot)
        if worker is not None and worker.epoch == epoch:
            worker.suspects.discard(request_id)

    def ended(self, slot: int, epoch: int, priority: int, tokens: int) -> None:
        """A request of `tokens` (prompt and output) that this router dispatched has ended at that run."""
        worker = self._workers.get(slot)
        if worker is not None and worker.epoch == epoch:
            worker.ended(priority, tokens)


def _compare(workers: list[Worker]) -> None:
    """Sets how slow each is beside the fastest of the model, by its own figures; one that has none is fast.

    A step that lasts longer than its worker's mean counts as long as it has lasted.
    """
    rates = [worker.status.prefill_tokens_per_s for worker in workers]
    steps = [max(worker.status.step_time_ms, float(worker.status.step_age_ms)) for worker in workers]
    best_rate, best_step = max(rates), min((step for step in steps if step > 0), default=0.0)
    for worker, rate, step in zip(workers, rates, steps, strict=True):
        prefill_slowness = _slowness(best_rate / rate) if rate > 0 else 1.0
        step_slowness = _slowness(step / best_step) if step > 0 else 1.0
        worker.compared(prefill_slowness, step_slowness)


def _slowness(ratio: float) -> float:
    """In quarters: less than that is noise, and would send all that comes to the same one of equals."""
    return min(MAX_SLOWNESS, round(4 * ratio) / 4)
