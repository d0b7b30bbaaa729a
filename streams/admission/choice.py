"""Which of some workers takes a request: only one that has room now (worker.py counts it), be it that lower
classes give way. Pure.

The score is a worker's load with the request on it, less what its prefix cache saves. All terms are in the
same unit, so affinity ends by itself where the favourite's queue is longer than the hit is worth; beyond
`max_affinity` a hit counts no more, so that a prefix that all share does not fill one worker first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, repeat, takewhile

from schemas.records import InferenceRequest
from streams.admission.affinity import PromptPrefix, cached_tokens_at, rendezvous
from streams.admission.hop import HopPolicy
from streams.admission.room import Part
from streams.admission.shares import Share
from streams.admission.worker import PREFILL_SCALE, Worker, num_tokens

# Scores that differ by less are taken for equal, and requests that belong together go the same way: a
# heartbeat is 100 ms old, in which a busy worker takes about that much (13 of 256 sequences).
NEAR = 0.05
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


class Blocked(Enum):
    """Why no worker takes a request now."""

    NO_WORKER = auto()  # none serves the model, or all that do are excluded
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """`affinity`: prefix hits and hints count. `max_affinity`: the load that a hit may outweigh. `hop`: when
    a prompt is computed elsewhere than its request is decoded."""

    affinity: bool = True
    max_affinity: float = DEFAULT_MAX_AFFINITY
    hop: HopPolicy = field(default_factory=HopPolicy)

    def pick(
        self, request: InferenceRequest, rated: Iterator[tuple[float, Worker]], prefix: PromptPrefix | None
    ) -> Worker:
        """Of the workers with room (one at least), by their scores: the best; of those near it the hint's.

        The best come first, and each is asked for room only when it is taken from `rated`.
        """
        best, chosen = next(rated)
        if prefix is None:
            return chosen
        near = [worker for _, worker in takewhile(lambda entry: entry[0] <= best + NEAR, rated)]
        hint = prefix.hint if near else None
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


def best_of(
    policy: RoutingPolicy,
    workers: Sequence[Worker],
    request: InferenceRequest,
    expected_output_tokens: int,
    known: PromptPrefix | None = None,
    share: Share | None = None,
    part: Part = Part.WHOLE,
) -> Worker | Blocked:
    """The worker with room for that part of the request that has the best score.

    `known` None: the cache says nothing. `share` None: all room is this process's. O(workers), a microsecond
    each: all are scored, and from the best on asked for room until one has it.
    """
    priority = request.priority
    to_compute = num_tokens(request, 0)
    if part is Part.PREFILL:
        expected_output_tokens = 1  # the first token is sampled there
    whole = to_compute + expected_output_tokens
    if part is Part.DECODE:
        to_compute = 0
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
            if worker.fits(request, part) and worker.room(request, expected_output_tokens, share, part):
                yield points, worker

    rated = with_room()
    first = next(rated, None)
    if first is None:
        return Blocked.NO_ROOM if any(w.fits(request, part) for w in workers) else Blocked.NO_WORKER
    return policy.pick(request, chain((first,), rated), known)
