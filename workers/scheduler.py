"""One scheduler without phases: each step spends a token budget on whatever is known but not computed."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Set, ValuesView
from operator import attrgetter

from schemas.priority import PriorityClass
from workers.batch import (
    PreemptionMode,
    PreemptionReason,
    RunnerOutput,
    ScheduledSequence,
    SchedulerOutput,
)
from workers.engine_stats import StepMeter
from workers.kv_budget import KVBudget
from workers.kv_cache_manager import KVCacheManager
from workers.preemption import Preemption, SwapCost
from workers.prompt_scheduler import PromptScheduler
from workers.request import FinishReason, Request, RequestOutput, RequestStatus
from workers.running_batch import RunningBatch
from workers.scheduler_config import SchedulerConfig
from workers.step_plan import StepPlan
from workers.step_time import StepTimeModel
from workers.stopping import Stopping
from workers.waiting_queue import WaitingQueue

_NONE_BLOCKED: frozenset[int] = frozenset()
_CLASSES = tuple(PriorityClass)
_priority = attrgetter("priority")


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
        self.meter = StepMeter()
        self.step_time = StepTimeModel()
        self.running = RunningBatch()
        self._stopping = Stopping(eos_token_ids)
        self._requests: dict[bytes, Request] = {}
        self._waiting = WaitingQueue()
        self.budget = KVBudget(kv_cache_manager, self.running, config.batch_watermark)
        self._preemption = Preemption(
            kv_cache_manager, self.running, self._waiting, self.budget, self.meter, swap_cost
        )
        self._prompts = PromptScheduler(
            kv_cache_manager,
            self.running,
            self._waiting,
            self.budget,
            self._preemption,
            config.max_num_seqs,
        )
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        return self._preemption.counts.total()

    @property
    def preemptions(self) -> Counter[tuple[PreemptionReason, PreemptionMode]]:
        """How many there were since the start."""
        return self._preemption.counts

    def num_waiting_by_class(self) -> tuple[int, ...]:
        """Queue lengths, indexed by class."""
        return self._waiting.len_by_class()

    def num_uncomputed_tokens(self) -> tuple[int, ...]:
        """Tokens to compute until every request samples, by class: the prefill that is queued here."""
        found = [self._waiting.num_uncomputed_tokens(priority) for priority in PriorityClass]
        for request in self.running:
            found[request.priority] += request.num_tokens - request.num_computed_tokens
        return tuple(found)

    def fragmentation(self) -> float:
        """The share of the slots in held blocks that hold no computed token, 0 … 1."""
        return self.kv_cache_manager.fragmentation(self.running)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def requests(self) -> ValuesView[Request]:
        """All that were added and have not ended, as they were added."""
        return self._requests.values()

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
        self._register(request)
        self._waiting.append(request)
        if reason := self._stopping.finish_reason(request):
            outputs.append(self._end(request, reason))
        elif error := self._refusal(request):
            outputs.append(self._end(request, FinishReason.ERROR, error))
        return outputs

    def adopt(self, request: Request, block_table: list[int]) -> bool:
        """Goes on with a request whose prompt another engine computed: its KV is in `block_table`, whose
        blocks are held for it, and its first token is among its output.

        False, with nothing changed, while all places are taken. Raises ValueError for what is not at its
        first decode, or has too few or too many blocks.
        """
        num_computed = request.num_tokens - 1
        if len(block_table) != self.kv_cache_manager.num_blocks_for(num_computed):
            raise ValueError(f"{len(block_table)} blocks are not those of {num_computed} tokens")
        if num_computed < len(request.prompt_token_ids):
            raise ValueError(f"request {request.request_id.hex()} has no first token")
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id.hex()} is here already")
        if self.running.num_seats + request.num_seats > self.config.max_num_seqs:
            return False
        self._register(request)
        request.block_table, request.num_computed_tokens = block_table, num_computed
        request.transition_to(RequestStatus.RUNNING)
        self.running.add(request, self.budget.expected_blocks(request))
        self.kv_cache_manager.cache_computed(request)
        return True

    def _register(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals
        self.limit_output(request)
        self._requests[request.request_id] = request

    def limit_output(self, request: Request) -> None:
        """By what it asks for and by the model's context."""
        context_left = self.config.max_model_len - len(request.prompt_token_ids)
        request.max_output_tokens = min(request.sampling.max_tokens, context_left)

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
        decodes, prefills = self.running.split(blocked_partitions)
        plan = StepPlan(self.config, self.step_time, len(decodes))
        num_interactive = bisect_right(decodes, PriorityClass.INTERACTIVE, key=_priority)
        self._schedule_decodes(decodes[:num_interactive], plan)
        plan.has_interactive_decode = bool(plan.decodes)

        lower = beside_a_prompt = decodes[num_interactive:]
        if self.config.hold_batch_in_prefill:
            beside_a_prompt = lower[: bisect_right(lower, PriorityClass.FREE, key=_priority)]
        plan.num_unsettled = len(beside_a_prompt)
        admitting = True
        for priority in _CLASSES:
            for request in prefills:
                if request.priority == priority and request.status is RequestStatus.RUNNING:
                    self._prompts.schedule_chunk(request, plan)
            # Who waits in a higher class keeps the lower ones from taking the blocks that it waits for.
            admitting = admitting and self._prompts.admit(priority, blocked_partitions, plan)
            if priority is PriorityClass.INTERACTIVE:
                going = beside_a_prompt if plan.has_interactive_chunk else lower
                self._schedule_decodes(going[: plan.num_decodes_in_time(going)], plan)
                plan.num_unsettled = 0
        return plan.finish()

    def has_room_for_all(self, num_due: int) -> bool:
        """Whether nobody gives way in a step in which what runs takes at most `num_due` blocks: there is room
        for all that wait and have somebody below them."""
        kv, num_seats = self.kv_cache_manager, self.running.num_seats
        for priority in _CLASSES[: self.running.last.priority]:
            for request in self._waiting.of_class(priority):
                num_seats += request.num_seats
                num_due += kv.num_blocks_for(request.num_tokens)
        return num_due <= kv.num_free_blocks and num_seats <= self.config.max_num_seqs

    def schedule_prompts(
        self,
        add_interactive: Callable[[StepPlan], None],
        add_lower: Callable[[StepPlan], None],
        prefills: list[Request],
    ) -> SchedulerOutput:
        """As `schedule`, where `has_room_for_all` holds, and of the lower classes that decode all go along,
        or none beside an interactive prompt. They are added to the plan, with their blocks, by the callers
        given; `prefills` are all others that run, in their order."""
        plan = StepPlan(self.config, self.step_time, 0)
        add_interactive(plan)
        plan.has_interactive_decode = bool(plan.decodes)
        admitting = True
        for priority in _CLASSES:
            for request in prefills:
                if request.priority == priority:
                    self._prompts.schedule_chunk(request, plan)
            admitting = admitting and self._prompts.admit(priority, _NONE_BLOCKED, plan)
            if priority is PriorityClass.INTERACTIVE and not plan.has_interactive_chunk:
                add_lower(plan)
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
                    if output.finish_reason is not FinishReason.ERROR:
                        self.budget.lengths.on_end(request)
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
            self.step_time.observe(
                num_seqs, further, batch.num_context_tokens, seconds, batch.num_attended_pairs
            )

    def _schedule_decodes(self, requests: list[Request], plan: StepPlan) -> None:
        block_size = self.kv_cache_manager.block_size
        allocate = self._preemption.allocate
        preempted = plan.output.preempted
        decodes = plan.decodes
        num_context_tokens = 0
        for request in requests:
            if preempted and request.status is not RequestStatus.RUNNING:
                continue
            num_tokens = request.num_computed_tokens + 1
            if num_tokens > len(request.block_table) * block_size and not allocate(request, 1, plan):
                continue
            num_context_tokens += num_tokens
            decodes.append(ScheduledSequence(request, 1, True))
        plan.add_context(num_context_tokens)

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
        kv, pool = self.kv_cache_manager, self.kv_cache_manager.pool
        num_blocks = kv.num_blocks_for(request.num_kv_tokens_at_most)
        if num_blocks > pool.num_blocks:
            return f"prompt and max_tokens need {num_blocks} KV blocks, the worker has {pool.num_blocks}"
        if len(self._waiting) > self.config.max_num_waiting:
            return f"{self.config.max_num_waiting} requests wait already"
        return ""
