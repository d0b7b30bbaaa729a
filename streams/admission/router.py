"""Picks the worker for a request, late: only one that has room now (worker.py counts it).

The score is a worker's load with the request on it, less what its prefix cache saves. All terms are in the
same unit, so affinity ends by itself where the favourite's queue is longer than the hit is worth; beyond
`max_affinity` a hit counts no more, so that a prefix that all share does not fill one worker first.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from schemas.fleet import Member
from schemas.prefix_sketch import is_shared
from schemas.records import InferenceRequest
from streams.admission.affinity import PromptPrefix, rendezvous
from streams.admission.fair_queue import QueuedRequest
from streams.admission.shares import Share
from streams.admission.worker import PREFILL_SCALE, InFlight, Worker

# Scores that differ by less are taken for equal, and requests that belong together go the same way: a
# heartbeat is 100 ms old, in which a busy worker takes about that much (13 of 256 sequences).
NEAR = 0.05
# A worker counts as at most so much slower than the fastest: rates are running means over unlike steps.
MAX_SLOWNESS = 4.0
# What a cached token is worth, in tokens of queue: one that this request need not wait for, and one that the
# worker can compute for another instead. With 1, two workers compute what both had sent at the same time.
HIT_WEIGHT = 2.0
# Half a batch, or 1,024 prompt tokens ahead.
DEFAULT_MAX_AFFINITY = 0.5
# More than any load: with another suspect only where there is no other room.
_APART = 1e6
_SUSPECT_ATTEMPT = 3


class Blocked(Enum):
    """Why no worker takes a request now."""

    NO_WORKER = auto()  # none serves the model, or all that do are excluded
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """`affinity`: prefix hits and hints count. `max_affinity`: the load that a hit may outweigh."""

    affinity: bool = True
    max_affinity: float = DEFAULT_MAX_AFFINITY


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
        """The worker with room for the request that has the best score. O(workers).

        `prefix` None: the cache says nothing. `share` None: all room is this process's.
        """
        policy = self.policy
        known = prefix if policy.affinity else None
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        suspect = is_suspect(request)
        scores: list[tuple[float, Worker]] = []
        blocked = Blocked.NO_WORKER
        for worker in self._by_model.get(request.model, ()):
            if worker.slot in request.excluded_slots or worker.epoch in request.lost_epochs:
                continue
            if not worker.fits(request):
                continue
            blocked = Blocked.NO_ROOM
            if not worker.has_room(request, expected_output_tokens, share):
                continue
            cached = 0 if known is None else worker.cached_tokens(known)
            points = score(policy, worker.load, num_tokens, cached, worker.prefill_slowness)
            if suspect and worker.suspects - {request.request_id}:
                points += _APART
            scores.append((points, worker))
        if not scores:
            return blocked
        best, chosen = min(scores, key=_score)
        hint = known.hint if known is not None and len(scores) > 1 else None
        if hint is not None:
            near = [worker for points, worker in scores if points <= best + NEAR]
            chosen = max(near, key=lambda worker: rendezvous(hint, worker.slot))
        return chosen

    def candidates(self, item: QueuedRequest, most: int) -> list[Worker]:
        """The least loaded that have room for it, `most` of them."""
        request, expected = item.request, item.expected_output_tokens
        fit = [
            w for w in self.workers(request.model) if w.fits(request) and w.has_room(request, expected, None)
        ]
        return sorted(fit, key=_load)[:most]

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

    def ended(self, slot: int, epoch: int, tokens: int) -> None:
        """A request of `tokens` (prompt and output) that this router dispatched has ended at that run."""
        worker = self._workers.get(slot)
        if worker is not None and worker.epoch == epoch:
            worker.ended_seqs += 1
            worker.ended_blocks += -(-tokens // worker.status.block_size)


def _load(worker: Worker) -> float:
    return worker.load


def _score(entry: tuple[float, Worker]) -> float:
    return entry[0]


def _compare(workers: list[Worker]) -> None:
    """Sets how slow each is beside the fastest of the model, by its own figures; one that has none is fast.

    A step that lasts longer than its worker's mean counts as long as it has lasted.
    """
    rates = [worker.status.prefill_tokens_per_s for worker in workers]
    steps = [max(worker.status.step_time_ms, float(worker.status.step_age_ms)) for worker in workers]
    best_rate, best_step = max(rates), min((step for step in steps if step > 0), default=0.0)
    for worker, rate, step in zip(workers, rates, steps, strict=True):
        worker.prefill_slowness = _slowness(best_rate / rate) if rate > 0 else 1.0
        worker.step_slowness = _slowness(step / best_step) if step > 0 else 1.0


def _slowness(ratio: float) -> float:
    """In quarters: less than that is noise, and would send all that comes to the same one of equals."""
    return min(MAX_SLOWNESS, round(4 * ratio) / 4)
