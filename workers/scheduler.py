"""One scheduler without phases: each step spends a token budget on whatever is known but not computed."""

from bisect import insort
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields

from schemas.priority import PriorityClass
from workers.batch import (
    Preempted,
    PreemptionMode,
    PreemptionReason,
    ScheduledSequence,
    SchedulerOutput,
)
from workers.kv_cache_manager import KVCacheManager
from workers.request import FinishReason, Request, RequestOutput, RequestStatus
from workers.waiting_queue import WaitingQueue

_CLASSES = tuple(PriorityClass)
_NONE_BLOCKED: frozenset[int] = frozenset()


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one engine. Raises ValueError that names every bad field."""

    max_model_len: int
    """Tokens of one sequence, prompt and output together."""
    max_num_seqs: int = 64
    """Sequences that hold blocks at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step. At least `max_num_seqs`, so that every decode has its place."""
    max_prefill_chunk: int = 512
    """Prompt tokens of one sequence in one step."""
    max_num_waiting: int = 1024
    """Requests that may wait here; more are refused."""

    def __post_init__(self) -> None:
        errors = [
            f"{f.name} must be at least 1, got {getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) < 1
        ]
        if self.max_num_batched_tokens < self.max_num_seqs:
            errors.append(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if errors:
            raise ValueError("; ".join(errors))


def _class_then_arrival(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


class Scheduler:
    """Owns every request from `add_request` to its end. Not thread-safe: one thread drives it."""

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, eos_token_ids: Set[int]
    ) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.num_preemptions = 0
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[bytes, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def num_waiting_by_class(self) -> tuple[int, ...]:
        """Queue lengths, indexed by class."""
        return self._waiting.len_by_class()

    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute until every request samples: the prefill that is queued here."""
        running = sum(r.num_tokens - r.num_computed_tokens for r in self._running)
        return self._waiting.num_tokens() + running

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
        self._requests[request.request_id] = request
        self._waiting.append(request)
        if reason := self._finish_reason(request):
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

    # NOTE: between two calls of schedule() every request is in exactly one of waiting (no blocks) and
    # running (blocks for all its tokens known at admission, and num_computed_tokens < num_tokens).
    # `_running` is sorted by class, then arrival: its last entry is the next victim, so whoever is first
    # always gets on, and a request alone fits the pool (add_request saw to that). Nothing can wait for ever.
    def schedule(self, blocked_partitions: Set[int] = _NONE_BLOCKED) -> SchedulerOutput:
        """The next step. Sequences whose reply partition is in `blocked_partitions` stand still."""
        output = SchedulerOutput()
        scheduled = output.scheduled
        prefills: tuple[list[Request], ...] = tuple([] for _ in _CLASSES)
        running = self._running
        allocate_slots = self.kv_cache_manager.allocate_slots
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            if blocked_partitions and request.reply_partition in blocked_partitions:
                continue
            if request.num_tokens - request.num_computed_tokens > 1:
                prefills[request.priority].append(request)
                continue
            while not allocate_slots(request, 1):
                victim = running[-1]
                self._preempt(victim, request, PreemptionReason.NO_FREE_BLOCK, output)
                if victim is request:
                    break
            else:
                scheduled.append(ScheduledSequence(request, 1, True))
        output.total_num_scheduled_tokens = len(scheduled)

        admitting = True
        for priority in _CLASSES:
            for request in prefills[priority]:
                if request.status is RequestStatus.RUNNING:
                    self._schedule_chunk(request, output)
            # Who waits in a higher class keeps the lower ones from taking the blocks that it waits for.
            admitting = admitting and self._admit(priority, blocked_partitions, output)
        return output

    def update_from_output(
        self, batch: SchedulerOutput, sampled: Sequence[int | None]
    ) -> list[RequestOutput]:
        """Books one executed step: new tokens and ends, in the order of the batch.

        Raises ValueError if the runner answered with another shape than it was asked for.
        """
        outputs = []
        for sequence, token_id in zip(batch.scheduled, sampled, strict=True):
            request = sequence.request
            request.num_computed_tokens += sequence.num_scheduled_tokens
            if not sequence.samples:
                continue
            if token_id is None:
                raise ValueError(f"request {request.request_id.hex()}: the runner sampled no token")
            output = RequestOutput(request, len(request.output_token_ids), [token_id])
            request.output_token_ids.append(token_id)
            if reason := self._finish_reason(request):
                self._end(request, reason)
                output.finish_reason = reason
            outputs.append(output)
        return outputs

    def _schedule_chunk(self, request: Request, output: SchedulerOutput) -> None:
        remaining = request.num_tokens - request.num_computed_tokens
        budget = self.config.max_num_batched_tokens - output.total_num_scheduled_tokens
        num_tokens = min(remaining, budget, self.config.max_prefill_chunk)
        if num_tokens > 0:
            output.scheduled.append(ScheduledSequence(request, num_tokens, num_tokens == remaining))
            output.total_num_scheduled_tokens += num_tokens

    def _admit(self, priority: PriorityClass, blocked_partitions: Set[int], output: SchedulerOutput) -> bool:
        """Moves waiting requests of one class into the batch. False if one of them had to stay behind."""
        while request := self._waiting.first(priority, blocked_partitions):
            if output.total_num_scheduled_tokens >= self.config.max_num_batched_tokens:
                return False
            num_victims = self._num_victims_for(request)
            if num_victims is None:
                return False
            for _ in range(num_victims):
                self._preempt(self._running[-1], request, PreemptionReason.HIGHER_CLASS_BLOCKS, output)
            self._waiting.remove(request)
            allocated = self.kv_cache_manager.allocate_slots(request, request.num_tokens)
            assert allocated, "_num_victims_for counted the blocks"
            request.transition_to(RequestStatus.RUNNING)
            insort(self._running, request, key=_class_then_arrival)
            output.admitted.append(request)
            self._schedule_chunk(request, output)
        return True

    def _num_victims_for(self, request: Request) -> int | None:
        """How many sequences of lower classes must give way so that `request` can run; None: no number helps.

        A block for each other running sequence is left free: every one of them needs its next block within
        `block_size` steps, and would preempt what was just admitted.
        """
        running = self._running
        needed = self.kv_cache_manager.num_blocks_for(request.num_tokens)
        free = self.kv_cache_manager.num_free_blocks
        num_left = len(running)
        while num_left >= self.config.max_num_seqs or needed + num_left > free:
            if num_left == 0 or running[num_left - 1].priority <= request.priority:
                return None
            num_left -= 1
            free += len(running[num_left].block_table)
        return len(running) - num_left

    def _preempt(
        self, victim: Request, for_request: Request, reason: PreemptionReason, output: SchedulerOutput
    ) -> None:
        """Takes the last running request out of the batch; it keeps its tokens and computes them anew."""
        assert victim is self._running[-1]
        self._running.pop()
        self.kv_cache_manager.free(victim)
        lost, victim.num_computed_tokens = victim.num_computed_tokens, 0
        victim.num_preemptions += 1
        victim.transition_to(RequestStatus.PREEMPTED)
        self._waiting.put_back(victim)
        self.num_preemptions += 1
        output.preempted.append(Preempted(victim, reason, PreemptionMode.RECOMPUTE, lost, for_request))
        for index, sequence in enumerate(output.scheduled):
            if sequence.request is victim:
                output.total_num_scheduled_tokens -= sequence.num_scheduled_tokens
                del output.scheduled[index]
                break

    def _end(self, request: Request, reason: FinishReason, error: str = "") -> RequestOutput:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self.kv_cache_manager.free(request)
        else:
            self._waiting.remove(request)
        request.transition_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        del self._requests[request.request_id]
        return RequestOutput(request, len(request.output_token_ids), [], reason, error)

    def _finish_reason(self, request: Request) -> FinishReason | None:
        """Whether the tokens so far are all there will be."""
        output, sampling = request.output_token_ids, request.sampling
        if output:
            last = output[-1]
            if last in self._eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP
            if last in sampling.stop_token_ids:
                return FinishReason.STOP
        if len(output) >= sampling.max_tokens:
            return FinishReason.LENGTH
        if output and request.num_tokens >= self.config.max_model_len:
            return FinishReason.LENGTH
        return None

    def _refusal(self, request: Request) -> str:
        """Why the request, just put into the queue, cannot run here; empty if it can."""
        num_prompt_tokens = len(request.prompt_token_ids)
        max_model_len = self.config.max_model_len
        if num_prompt_tokens == 0:
            return "prompt_token_ids is empty"
        if num_prompt_tokens >= max_model_len:
            return f"the prompt has {num_prompt_tokens} tokens, the model's context is {max_model_len}"
        # The last token is sampled but never computed.
        num_kv_tokens = min(num_prompt_tokens + request.sampling.max_tokens, max_model_len) - 1
        num_blocks, pool = self.kv_cache_manager.num_blocks_for(num_kv_tokens), self.kv_cache_manager.pool
        if num_blocks > pool.num_blocks:
            return f"prompt and max_tokens need {num_blocks} KV blocks, the worker has {pool.num_blocks}"
        if len(self._waiting) > self.config.max_num_waiting:
            return f"{self.config.max_num_waiting} requests wait already"
        return ""
