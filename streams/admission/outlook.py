"""What a request that comes now has to expect of its model's workers, by what each of them is for. Pure.

With roles a decode slot's empty prompt queue says nothing of a long prompt, which waits at a prefill slot;
free blocks at prefill say nothing of an answer, which is held at decode. `pools` None: all are unified.
"""

from collections.abc import Sequence

from schemas.records import InferenceRequest
from streams.admission.choice import Blocked, RoutingPolicy
from streams.admission.hop import HopPolicy, handoff_ms
from streams.admission.pairing import Pair, Pools, costs, route
from streams.admission.worker import Worker, num_tokens


def has_room(
    policy: RoutingPolicy,
    workers: Sequence[Worker],
    pools: Pools | None,
    request: InferenceRequest,
    expected_output_tokens: int,
) -> bool:
    """Whether it would be dispatched at once, if it came first. O(workers)."""
    if pools is None:
        return any(worker.room(request, expected_output_tokens, None) for worker in workers)
    return not isinstance(route(policy, pools, request, expected_output_tokens, None, None), Blocked)


def prefill_ms(
    policy: HopPolicy, workers: Sequence[Worker], pools: Pools | None, request: InferenceRequest
) -> float | None:
    """How long it takes from its dispatch to its first token where that is soonest, of each pair of pools by
    the way that it would go there. Nothing is taken to be cached. None: not measured yet. O(workers)."""
    priority, tokens = request.priority, num_tokens(request, 0)
    whole = workers if pools is None else pools.whole
    ways = [worker.prefill_ms(priority, tokens) for worker in whole]
    if pools is not None:
        ways += [_by_pair(policy, pair, request) for pair in pools.pairs]
    return min((ms for ms in ways if ms is not None), default=None)


def tokens_per_s(workers: Sequence[Worker], pools: Pools | None) -> float:
    """Prompt and output tokens that the workers get through, as far as they have measured it."""
    if pools is None:
        return sum(w.status.prefill_tokens_per_s + w.status.decode_tokens_per_s for w in workers)
    prompts = sum(worker.status.prefill_tokens_per_s for pair in pools.pairs for worker in pair.prefill)
    outputs = sum(worker.status.decode_tokens_per_s for pair in pools.pairs for worker in pair.decode)
    return tokens_per_s(pools.whole, None) + prompts + outputs


def kv_use(workers: Sequence[Worker], pools: Pools | None) -> float:
    """The part of the blocks for answers that is in use or claimed; 0 without workers."""
    if pools is not None:
        workers = [*pools.whole, *(worker for pair in pools.pairs for worker in pair.decode)]
    blocks = sum(worker.status.num_blocks for worker in workers)
    return 1.0 - sum(worker.free_blocks for worker in workers) / blocks if blocks else 0.0


def _by_pair(policy: HopPolicy, pair: Pair, request: InferenceRequest) -> float | None:
    priority, tokens = request.priority, num_tokens(request, 0)
    prefill = min(pair.prefill, key=lambda worker: worker.queued_tokens(priority))
    decode = min(pair.decode, key=lambda worker: worker.load)
    seen = costs(prefill, decode, request)
    if not policy.hops(seen):
        return decode.prefill_ms(priority, tokens)
    computed_ms = prefill.prefill_ms(priority, tokens)
    return None if computed_ms is None else computed_ms + handoff_ms(policy, seen)
