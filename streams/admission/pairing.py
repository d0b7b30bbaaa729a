"""Where a request goes in a fleet with prefill and decode slots: whole to one, or by way of two. Pure.

Unified slots take whole requests. A decode slot is paired with prefill slots whose KV it can take; which way
a request goes then, hop.py says. A slot that has no partner serves as if it were unified; so do, unless the
policy lets all requests wait, decode slots where waiting for a prefill slot costs more, and prefill slots
where decode has no room.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from schemas.handoff_records import WorkerRole
from schemas.records import InferenceRequest, KVLayout
from streams.admission.affinity import PromptPrefix
from streams.admission.choice import Blocked, RoutingPolicy, best_of
from streams.admission.hop import Hop, HopPolicy, whole
from streams.admission.room import Part
from streams.admission.shares import Share
from streams.admission.worker import Worker, num_tokens

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


class Way(StrEnum):
    """Where all of a request runs, or HANDOFF: its prompt is computed elsewhere than the rest."""

    UNIFIED = "unified"
    HANDOFF = "handoff"
    SHORT = "short"  # at a decode slot: there is too little to compute
    SPILL = "spill"  # at a slot whose partners have no room
    UNPAIRED = "unpaired"  # at a slot that has no partner


class Route(NamedTuple):
    """`decode` None: `worker` has all of it; else `worker` is a prefill slot that hands it to `decode`.
    `seen` is what decided between two ways, None where there was one."""

    way: Way
    worker: Worker
    decode: Worker | None = None
    seen: Hop | None = None

    @property
    def run(self) -> Worker:
        """Whose tokens its owner gets."""
        return self.decode or self.worker


@dataclass(slots=True)
class Pair:
    """Prefill and decode slots whose KV is of one kind."""

    prefill: list[Worker] = field(default_factory=list)
    decode: list[Worker] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pools:
    """One model's workers. `whole`: unified ones, and those without a partner. `missing`: roles that such
    workers lack a partner of."""

    whole: list[Worker]
    pairs: list[Pair]
    missing: frozenset[WorkerRole]

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> "Pools | None":
        """None for a model whose workers are all unified."""
        unified: list[Worker] = []
        by_kind: dict[object, Pair] = {}
        for worker in workers:
            role = worker.status.worker_role
            if role not in (WorkerRole.PREFILL, WorkerRole.DECODE):
                unified.append(worker)
                continue
            # None: it takes part in no handoff.
            pair = by_kind.setdefault(_kind(worker.status.kv_layout) or worker, Pair())
            (pair.prefill if role == WorkerRole.PREFILL else pair.decode).append(worker)
        if not by_kind:
            return None
        missing: set[WorkerRole] = set()
        pairs: list[Pair] = []
        for pair in by_kind.values():
            if pair.prefill and pair.decode:
                pairs.append(pair)
            else:
                missing.add(WorkerRole.DECODE if pair.prefill else WorkerRole.PREFILL)
                unified += pair.prefill + pair.decode
        return cls(unified, pairs, frozenset(missing))


def _kind(layout: KVLayout | None) -> object:
    """What must be equal on both sides. Block sizes and tensor-parallel degrees are converted."""
    if layout is None:
        return None
    return layout.dtype, layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.arithmetic


def route(
    policy: RoutingPolicy,
    pools: Pools,
    request: InferenceRequest,
    expected: int,
    prefix: PromptPrefix | None,
    share: Share | None,
) -> Route | Blocked:
    """The way that costs least of those that have room now. `expected`: output tokens. Asks each pool twice
    at most."""
    known = prefix if policy.affinity else None
    found: list[Worker | Blocked] = []

    def best(workers: Sequence[Worker], part: Part = Part.WHOLE) -> Worker | Blocked:
        found.append(best_of(policy, workers, request, expected, known, share, part))
        return found[-1]

    alone = best(pools.whole) if pools.whole else Blocked.NO_WORKER
    unified = alone if isinstance(alone, Worker) else None
    spills: list[tuple[Sequence[Worker], Sequence[Worker]]] = []
    for pair in pools.pairs:
        decode, prefill = best(pair.decode, Part.DECODE), best(pair.prefill, Part.PREFILL)
        if isinstance(decode, Worker) and isinstance(prefill, Worker):
            whole_there = bool(decode.room(request, expected, share))
            seen = _seen(policy.hop, prefill, decode, unified, request, prefix, whole_there)
            if unified is not None and policy.hop.takes_unified(seen):
                return Route(_way(unified), unified, seen=seen)
            if policy.hop.hops(seen):
                return Route(Way.HANDOFF, prefill, decode, seen)
            return Route(Way.SHORT, decode, seen=seen)
        # A pool that cannot serve it at all is none; for room at prefill it may cost less to wait.
        if prefill is Blocked.NO_WORKER:
            spills.append((pair.decode, ()))
        elif policy.hop.spill and isinstance(decode, Worker):
            spills.append((pair.decode, pair.prefill))
        if decode is Blocked.NO_WORKER or (policy.hop.spill and decode is Blocked.NO_ROOM):
            spills.append((pair.prefill, ()))
    if unified is not None:
        return Route(_way(unified), unified)
    for workers, busy in spills:
        if isinstance(spilled := best(workers), Worker):
            next_free = _next_free(busy, request)
            if next_free is None:
                return Route(Way.SPILL, spilled)
            waiting = _seen(policy.hop, next_free, spilled, None, request, prefix, True)
            if not policy.hop.hops(waiting):
                return Route(Way.SPILL, spilled, seen=waiting)
    return Blocked.NO_WORKER if all(each is Blocked.NO_WORKER for each in found) else Blocked.NO_ROOM


def _next_free(busy: Sequence[Worker], request: InferenceRequest) -> Worker | None:
    """Of prefill slots without room the one with the least to compute."""
    fit = [worker for worker in busy if worker.fits(request, Part.PREFILL)]
    return min(fit, key=lambda worker: worker.queued_tokens(request.priority), default=None)


def _way(worker: Worker) -> Way:
    return Way.UNIFIED if worker.status.worker_role == WorkerRole.UNIFIED else Way.UNPAIRED


def costs(
    prefill: Worker,
    decode: Worker,
    request: InferenceRequest,
    prefix: PromptPrefix | None = None,
    *,
    whole_there: bool = True,
) -> Hop:
    """What a handoff between the two is weighed by. `whole_there`: decode could take all of it."""
    priority, tokens = request.priority, num_tokens(request, 0)
    layout = decode.status.kv_layout
    return Hop(
        prompt_tokens=tokens,
        decode_cached_tokens=0 if prefix is None else decode.cached_tokens(prefix),
        decode_queued_tokens=decode.queued_tokens(priority),
        decode_tokens_per_s=decode.status.prefill_tokens_per_s,
        decode_streams=decode.status.num_running,
        prefill_cached_tokens=0 if prefix is None else prefill.cached_tokens(prefix),
        prefill_queued_tokens=prefill.queued_tokens(priority),
        prefill_tokens_per_s=prefill.status.prefill_tokens_per_s,
        kv_bytes_per_token=kv_bytes_per_token(layout),
        transfer_bytes_per_s=prefill.status.transfer_bytes_per_s,
        num_layers=0 if layout is None else layout.num_layers,
        decode_takes_whole=whole_there,
    )


def _seen(
    policy: HopPolicy,
    prefill: Worker,
    decode: Worker,
    unified: Worker | None,
    request: InferenceRequest,
    prefix: PromptPrefix | None,
    whole_there: bool,
) -> Hop:
    seen = costs(prefill, decode, request, prefix, whole_there=whole_there)
    if unified is None:
        return seen
    priority, tokens = request.priority, seen.prompt_tokens
    uncached = tokens - (0 if prefix is None else unified.cached_tokens(prefix))
    rate = unified.status.prefill_tokens_per_s or seen.prefill_tokens_per_s
    streams, ahead = unified.status.num_running, unified.queued_tokens(priority)
    return replace(seen, unified_ms=whole(policy, uncached, ahead, rate, streams))


def kv_bytes_per_token(layout: KVLayout | None) -> int:
    """Keys and values over all layers and ranks; 0 where it is not known."""
    if layout is None:
        return 0
    elements = 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim
    return elements * _ITEM_BYTES.get(layout.dtype, 2)
