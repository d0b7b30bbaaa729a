"""Prompts: who enters the running batch, and how much of each prompt a step computes."""

from collections.abc import Set

from schemas.priority import PriorityClass
from workers.batch import PreemptionReason
from workers.kv_budget import KVBudget
from workers.kv_cache_manager import KVCacheManager
from workers.preemption import Preemption
from workers.request import Request, RequestStatus
from workers.running_batch import RunningBatch
from workers.step_plan import StepPlan
from workers.waiting_queue import WaitingQueue

_SEQS, _BLOCKS = PreemptionReason.HIGHER_CLASS_SEQS, PreemptionReason.HIGHER_CLASS_BLOCKS
# Requests of a class that may be passed over in one step because another one computes their prompt.
_MAX_PASSED_OVER = 64


class PromptScheduler:
    """What a running request lacks beyond one token is its prompt here: it may be output to compute again."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        running: RunningBatch,
        waiting: WaitingQueue,
        budget: KVBudget,
        preemption: Preemption,
        max_num_seqs: int,
    ) -> None:
        self._kv = kv_cache_manager
        self._running = running
        self._waiting = waiting
        self._budget = budget
        self._preemption = preemption
        self._max_num_seqs = max_num_seqs

    def schedule_chunk(self, request: Request, plan: StepPlan) -> None:
        self._add_chunk(request, plan.chunk_size(request, request.num_computed_tokens), plan)

    def _add_chunk(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        if num_tokens > 0 and not self._preemption.allocate(request, num_tokens, plan):
            # Nobody gives way to the last one: it takes what there is.
            kv = self._kv
            num_slots = (len(request.block_table) + kv.num_free_blocks) * kv.block_size
            num_tokens = min(num_tokens, num_slots - request.num_computed_tokens)
            if num_tokens > 0:
                allocated = self._preemption.allocate(request, num_tokens, plan)
                assert allocated
        if num_tokens > 0:
            plan.add_chunk(request, num_tokens)
            if len(self._waiting):
                self._note_computing(request, num_tokens, plan)

    def admit(self, priority: PriorityClass, blocked_partitions: Set[int], plan: StepPlan) -> bool:
        """Moves waiting requests of one class into the batch. False if one of them had to stay behind.

        One whose prompt another sequence computes in this very step is passed over: it finds it in the cache
        when that is done.
        """
        waiting, kv, running = self._waiting, self._kv, self._running
        num_passed = 0
        while request := waiting.first(priority, blocked_partitions, num_passed):
            if not self._has_seat(request) and not running.has_below(priority):
                return False
            if plan.num_tokens_left <= 0 or num_passed > _MAX_PASSED_OVER:
                return False
            num_computed = request.num_computed_tokens or kv.find_cached(request)
            if plan.computing and self._is_computed_by_another(request, num_computed, plan):
                num_passed += 1
                continue
            num_preempted = len(plan.output.preempted)
            num_tokens = plan.chunk_size(request, num_computed)
            if not num_tokens or not self._make_room(request, plan):
                return False
            waiting.remove(request)
            self._start(request, plan)
            if len(plan.output.preempted) > num_preempted:
                # Who gave way left time and tokens, and maybe blocks that had been found cached.
                num_tokens = plan.chunk_size(request, request.num_computed_tokens)
            self._add_chunk(request, num_tokens, plan)
        return True

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Whether the request can start now; lower classes give way if that is what it takes."""
        kv, running, budget = self._kv, self._running, self._budget
        # What gave way in this step would take its blocks back.
        if plan.output.preempted and any(p.victim is request for p in plan.output.preempted):
            return False
        num_new_blocks = kv.num_new_blocks_for(request, request.num_tokens)
        if not budget.fits(request, num_new_blocks):
            return False
        while num_victims := budget.num_victims(request, num_new_blocks, self._max_num_seqs):
            for _ in range(num_victims):
                reason = _BLOCKS if self._has_seat(request) else _SEQS
                self._preemption.preempt(running.last, request, reason, plan)
            # A block that a victim gave back may be one that the request was to share with it.
            num_new_blocks = kv.num_new_blocks_for(request, request.num_tokens)
        return num_victims == 0

    def _has_seat(self, request: Request) -> bool:
        return self._running.num_seats + request.num_seats <= self._max_num_seqs

    def _start(self, request: Request, plan: StepPlan) -> None:
        kv = self._kv
        if request.host_block_table:
            pairs = kv.swap_in(request)
            assert pairs is not None, "_make_room counted the blocks"
            plan.output.swap_in += pairs
        else:
            num_cached = kv.take_cached(request)
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = min(num_cached, len(request.prompt_token_ids))
                if request.num_resumed_tokens:
                    # The attempt that came so far had computed all of it.
                    request.num_lost_tokens = request.num_tokens
            request.num_recomputed_tokens += max(0, request.num_lost_tokens - num_cached)
        # Nothing of its own is registered yet.
        request.num_shared_blocks = request.num_registered_blocks
        request.transition_to(RequestStatus.RUNNING)
        self._running.add(request, self._budget.expected_blocks(request))
        plan.output.admitted.append(request)

    def _note_computing(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        kv = self._kv
        if kv.hasher is None:
            return
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        for index in range(start // kv.block_size, end // kv.block_size):
            block_hash = kv.next_block_hash(request, index)
            assert block_hash is not None
            plan.computing[block_hash] = request

    def _is_computed_by_another(self, request: Request, num_computed: int, plan: StepPlan) -> bool:
        """Whether this step computes the next block of the request, and a sequence in it goes on to compute
        at least half of what the request lacks."""
        kv = self._kv
        num_blocks = num_computed // kv.block_size
        half = kv.num_blocks_for(num_computed + -(-(request.num_tokens - num_computed) // 2))
        # The block of its last token is never found: that token is to be computed.
        if request.host_block_table or not num_blocks < half <= (request.num_tokens - 1) // kv.block_size:
            return False
        block_hash = kv.next_block_hash(request, num_blocks)
        other = plan.computing.get(block_hash) if block_hash else None
        return other is not None and (
            kv.next_block_hash(other, half - 1) == kv.next_block_hash(request, half - 1)
        )
