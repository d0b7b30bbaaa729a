"""Who gives way, and what becomes of its KV: copied to host memory and back, or computed again."""

from collections import Counter
from dataclasses import dataclass

from workers.batch import Preempted, PreemptionMode, PreemptionReason
from workers.engine_stats import StepMeter
from workers.kv_budget import KVBudget
from workers.kv_cache_manager import KVCacheManager
from workers.request import Request, RequestStatus
from workers.running_batch import RunningBatch
from workers.step_plan import StepPlan
from workers.waiting_queue import WaitingQueue

# Of a prompt, until one was measured: slow enough that a first victim's work is kept if that is possible.
_FIRST_PREFILL_TOKENS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Bytes of a block over all layers, and the speed of a copy, one way."""

    bytes_per_block: int
    bytes_per_s: float

    def swaps(self, num_tokens: int, num_blocks: int, prefill_tokens_per_s: float) -> bool:
        """Whether copying `num_blocks` out and in is faster than to compute `num_tokens` again.

        `prefill_tokens_per_s` as measured, 0 if nothing was yet.
        """
        swap_s = 2 * num_blocks * self.bytes_per_block / self.bytes_per_s
        recompute_s = num_tokens / (prefill_tokens_per_s or _FIRST_PREFILL_TOKENS_PER_S)
        return swap_s < recompute_s


class Preemption:
    """Gives blocks to running requests, if need be those of the last ones: of the lowest class, the newest.

    The preempted go back to the head of their class. `counts` is by reason and mode, since the start.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        running: RunningBatch,
        waiting: WaitingQueue,
        budget: KVBudget,
        meter: StepMeter,
        swap_cost: SwapCost | None,
    ) -> None:
        self.counts: Counter[tuple[PreemptionReason, PreemptionMode]] = Counter()
        self._kv = kv_cache_manager
        self._running = running
        self._waiting = waiting
        self._budget = budget
        self._meter = meter
        self._swap_cost = swap_cost

    def allocate(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for the next tokens of a running request; others give way to it, from the last one on.

        False if that does not suffice: then it is the last one itself, and stands still with what it has.
        """
        kv, running = self._kv, self._running
        num_held = len(request.block_table)
        while not kv.allocate_slots(request, num_tokens):
            if running.last is request:
                return False
            self.preempt(running.last, request, PreemptionReason.NO_FREE_BLOCK, plan)
        if len(request.block_table) > num_held:
            self._budget.on_allocated(request, len(request.block_table) - num_held)
        return True

    def preempt(
        self, victim: Request, for_request: Request, reason: PreemptionReason, plan: StepPlan
    ) -> None:
        """Takes the last running request out of the batch; it keeps its tokens, and its KV if that pays."""
        kv, output = self._kv, plan.output
        plan.drop(victim)
        self._running.remove(victim)
        mode, num_lost = PreemptionMode.RECOMPUTE, victim.num_computed_tokens
        if self._swaps(victim):
            pairs = kv.swap_out(victim)
            if pairs is not None:
                output.swap_out += pairs
                mode, num_lost = PreemptionMode.SWAP, 0
        if mode is PreemptionMode.RECOMPUTE:
            kv.free(victim)
            victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.num_lost_tokens = num_lost
        victim.transition_to(RequestStatus.PREEMPTED)
        self._waiting.put_back(victim)
        self.counts[reason, mode] += 1
        output.preempted.append(Preempted(victim, reason, mode, num_lost, for_request))

    def _swaps(self, victim: Request) -> bool:
        cost, num_tokens = self._swap_cost, victim.num_computed_tokens
        if cost is None or not num_tokens:
            return False
        return cost.swaps(num_tokens, self._kv.num_blocks_for(num_tokens), self._meter.prefill_tokens_per_s)
