"""One scheduler without phases: each step spends a token budget on whatever is known but not computed."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Set

from schemas.priority import PriorityClass
from workers.batch import (
    Preempted,
    PreemptionMode,
    PreemptionReason,
    RunnerOutput,
    ScheduledSequence,
    SchedulerOutput,
)
from workers.engine_stats import StepMeter
from workers.kv_budget import KVBudget
from workers.kv_cache_manager import KVCacheManager
from workers.preemption import SwapCost
from workers.request import FinishReason, Request, RequestOutput, RequestStatus
from workers.running_batch import RunningBatch
from workers.scheduler_config import SchedulerConfig
from workers.step_plan import StepPlan
from workers.step_time import StepTimeModel
from workers.stopping import Stopping
from workers.waiting_queue import WaitingQueue

_NONE_BLOCKED: frozenset[int] = frozenset()
# Requests of a class that may be passed over in one step because another one computes their prompt.
_MAX_PASSED_OVER = 64


def _priority(request: Request) -> PriorityClass:
    return request.priority


class Scheduler:
    """Owns every request from `add_request` to its end. Not thread-safe: one thread drives it.

    `swap_cost` None: preempted requests are always computed again.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        eos_token_ids: Set[int],
        swap_cost: SwapCost | None = None,
    ) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.preemptions: Counter[tuple[PreemptionReason, PreemptionMode]] = Counter()
        self.meter = StepMeter()
        self.step_time = StepTimeModel()
        self._swap_cost = swap_cost
        self._stopping = Stopping(eos_token_ids)
        self._requests: dict[bytes, Request] = {}
        self._waiting = WaitingQueue()
        self.running = RunningBatch()
        self._budget = KVBudget(kv_cache_manager, self.running, config.batch_watermark)
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        return self.preemptions.total()

    def num_waiting_by_class(self) -> tuple[int, ...]:
        """Queue lengths, indexed by class."""
        return self._waiting.len_by_class()

    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute until every request samples: the prefill that is queued here."""
        running = sum(r.num_tokens - r.num_computed_tokens for r in self.running)
        return self._waiting.num_uncomputed_tokens() + running

    def fragmentation(self) -> float:
        """The share of the slots in held blocks that hold no computed token, 0 … 1."""
        return self.kv_cache_manager.fragmentation(self.running)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: Request) -> list[RequestOutput]:
        """Queues a request and returns the ends that this causes.

        A lower attempt of the same request ends as superseded. A request that can never run, or finds the
        queue full, ends with an error that says why; a resumed one that has all its tokens ends normally.
        An attempt that is not higher than the known one is ignored.
        """
        outputs = []
        known = self._requests.get(request.request_id)
        if known is not None:
            if request.attempt <= known.attempt:
                return []
            outputs.append(self._end(known, FinishReason.SUPERSEDED))
        self._arrivals += 1
        request.arrival = self._arrivals
        context_left = self.config.max_model_len - len(request.prompt_token_ids)
        request.max_output_tokens = min(request.sampling.max_tokens, context_left)
        self._requests[request.request_id] = request
        self._waiting.append(request)
        if reason := self._stopping.finish_reason(request):
            outputs.append(self._end(request, reason))
        elif error := self._refusal(request):
            outputs.append(self._end(request, FinishReason.ERROR, error))
        return outputs

    def abort(self, request_id: bytes, attempt: int) -> RequestOutput | None:
        """Ends the request if its attempt is at most `attempt`; its blocks are free when this returns."""
        request = self._requests.get(request_id)
        if request is None or request.attempt > attempt:
            return None
        return self._end(request, FinishReason.CANCELLED)

    # NOTE: between two steps every request is in exactly one of waiting (no device blocks) and running
    # (blocks for all that it has computed, and num_computed_tokens < num_tokens). The running batch is sorted
    # by class, then arrival, and its last entry is the next victim: whoever is first always gets on, and a
    # request alone fits the pool (add_request saw to that). Nothing can wait for ever.
    # Classes are served from the highest down, so what a step has admitted is never its victim.
    def schedule(self, blocked_partitions: Set[int] = _NONE_BLOCKED) -> SchedulerOutput:
        """The next step. Sequences whose reply partition is in `blocked_partitions` stand still."""
        decodes, prefills = self._split_running(blocked_partitions)
        plan = StepPlan(self.config, self.step_time, len(decodes))
        num_interactive = bisect_right(decodes, PriorityClass.INTERACTIVE, key=_priority)
        self._schedule_decodes(decodes[:num_interactive], plan)
        plan.has_interactive_decode = bool(plan.decodes)

        lower = decodes[num_interactive:]
        plan.num_unsettled = len(lower)
        admitting = True
        for priority in PriorityClass:
            for request in prefills[priority]:
                if request.status is RequestStatus.RUNNING:
                    self._schedule_chunk(request, plan)
            # Who waits in a higher class keeps the lower ones from taking the blocks that it waits for.
            admitting = admitting and self._admit(priority, blocked_partitions, plan)
            if priority is PriorityClass.INTERACTIVE and lower:
                if self.config.hold_batch_in_prefill and plan.has_interactive_chunk:
                    lower = lower[: bisect_right(lower, PriorityClass.FREE, key=_priority)]
                self._schedule_decodes(lower[: plan.num_decodes_in_time(lower)], plan)
                plan.num_unsettled = 0
        return plan.finish()

    def update_from_output(self, batch: SchedulerOutput, sampled: RunnerOutput) -> list[RequestOutput]:
        """Books one executed step: new tokens and ends, in the order of the batch.

        Raises ValueError if the runner answered with another shape than it was asked for.
        """
        kv = self.kv_cache_manager
        block_size = kv.block_size
        caching = kv.hasher is not None
        kv.release_swapped_in()
        take = self._stopping.take
        outputs = []
        logprobs = sampled.logprobs or [None] * len(batch.scheduled)
        for sequence, token_id, logprob in zip(batch.scheduled, sampled.token_ids, logprobs, strict=True):
            request = sequence.request
            num_scheduled = sequence.num_scheduled_tokens
            request.num_computed_tokens = num_computed = request.num_computed_tokens + num_scheduled
            if caching and num_computed % block_size < num_scheduled:
                kv.cache_computed(request)
            if not sequence.samples:
                continue
            if token_id is None:
                raise ValueError(f"request {request.request_id.hex()}: the runner sampled no token")
            output = take(request, token_id, logprob)
            if output is not None:
                if output.finish_reason is not None:
                    self._budget.lengths.on_end(request)
                    self._end(request, output.finish_reason)
                outputs.append(output)
        return outputs

    def observe(self, batch: SchedulerOutput, seconds: float) -> None:
        """Learns how long an executed step took."""
        if not batch.scheduled:
            return
        self.meter.add(batch, seconds)
        if not (batch.swap_out or batch.swap_in):
            num_seqs = len(batch.scheduled)
            further = batch.total_num_scheduled_tokens - num_seqs
            self.step_time.observe(num_seqs, further, batch.num_context_tokens, seconds)

    def _split_running(self, blocked_partitions: Set[int]) -> tuple[list[Request], list[list[Request]]]:
        """Running requests that lack one token, and by class those that lack more."""
        decodes: list[Request] = []
        prefills: list[list[Request]] = [[] for _ in PriorityClass]
        for request in self.running:
            if blocked_partitions and request.reply_partition in blocked_partitions:
                continue
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            if num_tokens - request.num_computed_tokens > 1:
                prefills[request.priority].append(request)
            else:
                decodes.append(request)
        return decodes, prefills

    def _schedule_decodes(self, requests: list[Request], plan: StepPlan) -> None:
        block_size = self.kv_cache_manager.block_size
        preempted = plan.output.preempted
        decodes = plan.decodes
        num_context_tokens = 0
        for request in requests:
            if preempted and request.status is not RequestStatus.RUNNING:
                continue
            num_tokens = request.num_computed_tokens + 1
            if num_tokens > len(request.block_table) * block_size and not self._allocate(request, 1, plan):
                continue
            num_context_tokens += num_tokens
            decodes.append(ScheduledSequence(request, 1, True))
        plan.add_context(num_context_tokens)

    def _schedule_chunk(self, request: Request, plan: StepPlan) -> None:
        num_tokens = plan.chunk_size(request, request.num_computed_tokens)
        if num_tokens > 0 and not self._allocate(request, num_tokens, plan):
            # Nobody gives way to the last one: it takes what there is.
            kv = self.kv_cache_manager
            num_slots = (len(request.block_table) + kv.num_free_blocks) * kv.block_size
            num_tokens = min(num_tokens, num_slots - request.num_computed_tokens)
            if num_tokens > 0:
                allocated = self._allocate(request, num_tokens, plan)
                assert allocated
        if num_tokens > 0:
            plan.add_chunk(request, num_tokens)
            if len(self._waiting):
                self._note_computing(request, num_tokens, plan)

    def _allocate(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for the next tokens of a running request; others give way to it, from the last one on.

        False if that does not suffice: then it is the last one itself, and stands still with what it has.
        """
        kv, running = self.kv_cache_manager, self.running
        num_held = len(request.block_table)
        while not kv.allocate_slots(request, num_tokens):
            if running.last is request:
                return False
            self._preempt(running.last, request, PreemptionReason.NO_FREE_BLOCK, plan)
        if len(request.block_table) > num_held:
            self._budget.on_allocated(request, len(request.block_table) - num_held)
        return True

    def _admit(self, priority: PriorityClass, blocked_partitions: Set[int], plan: StepPlan) -> bool:
        """Moves waiting requests of one class into the batch. False if one of them had to stay behind.

        One whose prompt another sequence computes in this very step is passed over: it finds it in the cache
        when that is done.
        """
        waiting, kv = self._waiting, self.kv_cache_manager
        num_passed = 0
        while request := waiting.first(priority, blocked_partitions, num_passed):
            if plan.num_tokens_left <= 0 or num_passed > _MAX_PASSED_OVER:
                return False
            num_computed = request.num_computed_tokens or kv.find_cached(request)
            if plan.computing and self._is_computed_by_another(request, num_computed, plan):
                num_passed += 1
                continue
            if not plan.chunk_size(request, num_computed) or not self._make_room(request, plan):
                return False
            waiting.remove(request)
            self._start(request, plan)
        return True

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Whether the request can start now; lower classes give way if that is what it takes."""
        kv, running = self.kv_cache_manager, self.running
        max_num_seqs = self.config.max_num_seqs
        if len(running) >= max_num_seqs and not running.has_below(request.priority):
            return False
        if any(p.victim is request for p in plan.output.preempted):
            return False
        if not self._budget.fits(request, kv.num_new_blocks_for(request, request.num_tokens)):
            return False
        # Again, because a block that a victim frees may be one that the request was to share with it.
        while num_victims := self._budget.num_victims(
            request, kv.num_new_blocks_for(request, request.num_tokens), max_num_seqs
        ):
            for _ in range(num_victims):
                seats = len(running) >= max_num_seqs
                reason = PreemptionReason.HIGHER_CLASS_SEQS if seats else PreemptionReason.HIGHER_CLASS_BLOCKS
                self._preempt(running.last, request, reason, plan)
        return num_victims == 0

    def _start(self, request: Request, plan: StepPlan) -> None:
        kv = self.kv_cache_manager
        if request.host_block_table:
            pairs = kv.swap_in(request)
            assert pairs is not None, "_make_room counted the blocks"
            plan.output.swap_in += pairs
        else:
            num_cached = kv.take_cached(request)
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = min(num_cached, len(request.prompt_token_ids))
        request.transition_to(RequestStatus.RUNNING)
        self.running.add(request, self._budget.expected_blocks(request))
        plan.output.admitted.append(request)
        self._schedule_chunk(request, plan)

    def _note_computing(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        kv = self.kv_cache_manager
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
        kv = self.kv_cache_manager
        if request.host_block_table:
            return False
        next_hash = kv.next_block_hash(request, num_computed // kv.block_size)
        other = plan.computing.get(next_hash) if next_hash else None
        if other is None:
            return False
        half = num_computed + -(-(request.num_tokens - num_computed) // 2)
        index = kv.num_blocks_for(half) - 1
        block_hash = kv.next_block_hash(request, index)
        return block_hash is not None and block_hash == kv.next_block_hash(other, index)

    def _preempt(
        self, victim: Request, for_request: Request, reason: PreemptionReason, plan: StepPlan
    ) -> None:
        """Takes the last running request out of the batch; it keeps its tokens, and its KV if that pays."""
        kv, output = self.kv_cache_manager, plan.output
        plan.drop(victim)
        self.running.remove(victim)
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
        victim.transition_to(RequestStatus.PREEMPTED)
        self._waiting.put_back(victim)
        self.preemptions[reason, mode] += 1
        output.preempted.append(Preempted(victim, reason, mode, num_lost, for_request))

    def _swaps(self, victim: Request) -> bool:
        cost, num_tokens = self._swap_cost, victim.num_computed_tokens
        if cost is None or not num_tokens:
            return False
        return cost.swaps(
            num_tokens, self.kv_cache_manager.num_blocks_for(num_tokens), self.meter.prefill_tokens_per_s
        )

    def _end(self, request: Request, reason: FinishReason, error: str = "") -> RequestOutput:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self._waiting.remove(request)
        self.kv_cache_manager.free(request)
        self._stopping.forget(request)
        request.transition_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        del self._requests[request.request_id]
        num_told = len(request.output_token_ids) - request.num_held_tokens
        return RequestOutput(request, num_told, [], reason, error)

    def _refusal(self, request: Request) -> str:
        """Why the request, just put into the queue, cannot run here; empty if it can."""
        num_prompt_tokens = len(request.prompt_token_ids)
        max_model_len = self.config.max_model_len
        if num_prompt_tokens == 0:
            return "prompt_token_ids is empty"
        if num_prompt_tokens >= max_model_len:
            return f"the prompt has {num_prompt_tokens} tokens, the model's context is {max_model_len}"
        # The last token is sampled but never computed.
        num_kv_tokens = num_prompt_tokens + request.max_output_tokens - 1
        num_blocks, pool = self.kv_cache_manager.num_blocks_for(num_kv_tokens), self.kv_cache_manager.pool
        if num_blocks > pool.num_blocks:
            return f"prompt and max_tokens need {num_blocks} KV blocks, the worker has {pool.num_blocks}"
        if len(self._waiting) > self.config.max_num_waiting:
            return f"{self.config.max_num_waiting} requests wait already"
        return ""
