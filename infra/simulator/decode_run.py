"""Leaps: many decode steps at once, while nothing but decoding can happen in an engine.

As long as every request in an engine is a running one that lacks its next token, each step schedules all of
them for one token. Then what a step costs is known in closed form, blocks are due at known steps, and ends
come at known steps. A `DecodeRun` plans such steps without touching any request, carries out as many of them
as came to pass, and leaves the scheduler as the same number of `schedule` and `update_from_output` would:
it makes the same calls to pools, budget, step-time model and meter, in the same order.

While prompts are computed beside the decodes, it goes on step by step: the scheduler plans the prompts, and
the decodes still go by what is known of them. A request joins when its prompt has ended.

Not planned are steps that would preempt, or that the inter-token target would hold a lower class back in.
"""

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter

from infra.simulator.leap_rules import is_in_time, is_timed
from schemas.priority import PriorityClass
from workers.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from workers.request import FinishReason, Request, RequestOutput
from workers.roofline import StepCosts
from workers.scheduler import Scheduler

# A plan that is cut short was made for nothing.
_MAX_PLANNED = 32


@dataclass(slots=True, eq=False)
class _Member:
    """A running request. `order` is its place in the batch, `end` the step that gives its last token; up to
    `synced` it has its tokens. `bucket` has those whose blocks are due in the same steps, in their order."""

    request: Request
    order: tuple[PriorityClass, int]
    end: int
    bucket: list["_Member"]
    synced: int
    sequence: ScheduledSequence


_order = attrgetter("order")
_arrival = attrgetter("arrival")


class DecodeRun:
    """One stretch of decoding. Steps are counted from 1 on; `num_done` of them were carried out.

    `ends` are the times at which the planned steps end, in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        roofline: StepCosts,
        num_left: Callable[[Request], int],
        token_id: int,
        last_token_id: int,
    ) -> None:
        """Of all that runs in `scheduler`; `can_leap` must hold. `num_left(request)` tokens are to come of a
        request, `last_token_id` is the last of them, the others are `token_id`."""
        self.num_done = 0
        self.ends: list[float] = []
        self._seconds: list[float] = []
        self._scheduler = scheduler
        self._kv = scheduler.kv_cache_manager
        self._roofline = roofline
        self._token_id, self._last_token_id = token_id, last_token_id
        self._buckets: list[list[_Member]] = [[] for _ in range(self._kv.block_size)]
        self._num_left = num_left
        self._num_by_class = [0] * len(PriorityClass)
        self._members: list[_Member] = []
        self._num_context_tokens = 0
        # Those whose prompts are being computed, in the order of the batch.
        self._prefills: list[Request] = []
        # A heap by end; of those that end together, the first in the batch goes first.
        self._by_end: list[tuple[int, tuple[PriorityClass, int], _Member]] = []
        for request in scheduler.running:
            self._join(request)

    @property
    def num_by_class(self) -> list[int]:
        """Requests that run, by class."""
        return self._num_by_class

    def positions(self) -> list[tuple[Request, int]]:
        """Each request that runs, and the output position of its next token."""
        done = self.num_done
        return [(m.request, len(m.request.output_token_ids) + done - m.synced) for m in self._members]

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing but what it decodes."""
        return not self._prefills and not self._scheduler.num_waiting

    def plan(self, now: float) -> bool:
        """Plans steps from `now` on, up to the next end of a request. False if not even one goes so."""
        num_seqs = len(self._members)
        if not num_seqs:
            return False
        step, last = self.num_done, min(self._by_end[0][0], self.num_done + _MAX_PLANNED)
        interactive, *lower = self._num_by_class
        if is_timed(self._scheduler, interactive > 0 and any(lower)):
            if not is_in_time(self._scheduler, num_seqs, self._num_context_tokens):
                return False
            last = step + 1
        num_steps = self._num_steps_with_blocks(last - step)
        first = self._num_context_tokens + num_seqs
        contexts = range(first, first + num_steps * num_seqs, num_seqs)
        self._seconds = list(map(self._roofline.decode_seconds(num_seqs), contexts))
        _, *self.ends = accumulate(self._seconds, initial=now)
        return bool(self.ends)

    def _num_steps_with_blocks(self, most: int) -> int:
        """For how many of the next steps, `most` at most, there are blocks."""
        block_size, free = self._kv.block_size, self._kv.num_free_blocks
        if free >= len(self._members) * -(-most // block_size):
            return most
        for num_steps in range(most):
            free -= len(self._buckets[(self.num_done + num_steps + 1) % block_size])
            if free < 0:
                return num_steps
        return most

    def cut(self, now: float) -> None:
        """Something comes at `now`: the step that is being computed is the last one of the plan."""
        num_kept = bisect_right(self.ends, now) + 1
        del self.ends[num_kept:], self._seconds[num_kept:]

    def carry_out(self, num_steps: int) -> list[Request]:
        """The first `num_steps` of the plan. Returns the requests that ended with the last of them."""
        num_seqs = len(self._members)
        block_size, buckets = self._kv.block_size, self._buckets
        seconds, context = self._seconds[:num_steps], self._num_context_tokens
        first, last = self.num_done + 1, self.num_done + len(seconds)
        contexts = range(context + num_seqs, context + num_seqs * (len(seconds) + 1), num_seqs)
        # As `Scheduler.observe` does. Nobody asks meter or model before the last of these steps is over.
        self._scheduler.meter.add_decodes(num_seqs, seconds)
        self._scheduler.step_time.observe_steps(num_seqs, 0, zip(contexts, seconds, strict=True))
        del self.ends[:num_steps], self._seconds[:num_steps]
        if self._kv.hasher is None:
            self._grow([(m, at) for at in range(first, last + 1) for m in buckets[at % block_size]])
            return self._book(len(seconds))
        ended: list[Request] = []
        for at in range(first, last + 1):
            self._grow([(member, at) for member in buckets[at % block_size]])
            ended += self._book(1)
        return ended

    def can_step(self) -> bool:
        """Whether the next step goes beside prompts: nobody can give way to them, for there is one class and
        there are blocks for all that runs."""
        scheduler, kv = self._scheduler, self._kv
        if not self._members:
            return False
        priority = scheduler.running[0].priority
        if scheduler.running.last.priority is not priority:
            return False
        if scheduler.num_waiting != scheduler.num_waiting_by_class()[priority]:
            return False
        num_due = len(self._buckets[(self.num_done + 1) % kv.block_size])
        for request in self._prefills:
            if request.num_tokens - request.num_computed_tokens == 1:
                return False  # decoded like the members, but with a time of its own
            num_due += kv.num_blocks_for(request.num_tokens) - len(request.block_table)
        return num_due <= kv.num_free_blocks

    def schedule(self) -> SchedulerOutput:
        """Begins a step beside prompts; `can_step` must hold."""
        step = self.num_done + 1
        self._grow([(member, step) for member in self._buckets[step % self._kv.block_size]])
        decodes = [member.sequence for member in self._members]
        num_context_tokens = self._num_context_tokens + len(decodes)
        batch = self._scheduler.schedule_prompts(decodes, num_context_tokens, self._prefills)
        for request in batch.admitted:
            insort(self._prefills, request, key=_arrival)
        return batch

    def chunks(self, batch: SchedulerOutput) -> list[ScheduledSequence]:
        """Of a step that it has begun, the prompts' part."""
        return batch.scheduled[len(self._members) :]

    def update_from_output(
        self, batch: SchedulerOutput, sampled: RunnerOutput
    ) -> tuple[list[Request], list[RequestOutput]]:
        """Books the step that `schedule` began: `sampled` are the tokens of its `chunks`. Returns who ended,
        and the outputs of the chunks. Those whose prompts have ended join."""
        chunks = self.chunks(batch)
        ended = self._book(1)
        outputs = self._scheduler.update_from_output(SchedulerOutput(chunks), sampled)
        for sequence in chunks:
            if sequence.samples:
                self._prefills.remove(sequence.request)
                if sequence.request.finish_reason is None:
                    self._join(sequence.request)
        return ended, outputs

    def close(self) -> list[Request]:
        """Brings every request in it up to date, for the scheduler to go on with. Returns them."""
        for member in self._members:
            self._sync(member, self.num_done)
        return [member.request for member in self._members]

    def _grow(self, due: list[tuple[_Member, int]]) -> None:
        """Gives each member the block that it needs in a step: (member, step), in the order of the steps."""
        budget, running = self._scheduler.budget, self._scheduler.running
        grown = self._kv.append_blocks([member.request for member, _ in due])
        for request, (member, step) in zip(grown, due, strict=True):
            if len(request.block_table) > request.num_expected_blocks:
                self._sync(member, step - 1)  # it is longer than was expected: what is expected now?
                budget.on_allocated(request, 1)
            else:
                running.on_allocated(request, 1)

    def _sync(self, member: _Member, step: int) -> None:
        num_tokens = step - member.synced
        if num_tokens <= 0:
            return
        member.synced = step
        request = member.request
        request.num_computed_tokens += num_tokens
        request.output_token_ids.extend([self._token_id] * num_tokens)

    def _join(self, request: Request) -> None:
        """A running request that lacks one token."""
        num_computed = request.num_computed_tokens
        # A block is due where the table is full, and then every block_size steps.
        bucket = self._buckets[(self.num_done + 1 - num_computed) % self._kv.block_size]
        member = _Member(
            request,
            (request.priority, request.arrival),
            self.num_done + self._num_left(request),
            bucket,
            self.num_done,
            ScheduledSequence(request, 1, True),
        )
        self._members.append(member)
        insort(bucket, member, key=_order)
        heappush(self._by_end, (member.end, member.order, member))
        self._num_by_class[request.priority] += 1
        self._num_context_tokens += num_computed

    def _book(self, num_steps: int) -> list[Request]:
        """Steps of all members, who have the blocks. With prefix caching one, otherwise up to the next end.
        Returns the requests that ended with the last."""
        self._num_context_tokens += num_steps * len(self._members)
        step = self.num_done = self.num_done + num_steps
        ending: list[_Member] = []
        while self._by_end and self._by_end[0][0] == step:
            ending.append(heappop(self._by_end)[-1])
        if self._kv.hasher is None:
            return [self._end(member) for member in ending]
        # Those whose block is full now. At once: a block of the same hash may be evicted later.
        full = self._buckets[(step + 1) % self._kv.block_size]
        ended: list[Request] = []
        for member in sorted({*full, *ending}, key=_order):
            if member.end == step:
                ended.append(self._end(member))
            else:
                self._sync(member, step)
                self._kv.cache_computed(member.request)
        return ended

    def _end(self, member: _Member) -> Request:
        request, step = member.request, member.end
        self._sync(member, step - 1)
        # The last token is one that the scheduler takes itself: it books the end.
        sampled = RunnerOutput([self._last_token_id])
        batch = SchedulerOutput([member.sequence])
        (output,) = self._scheduler.update_from_output(batch, sampled)
        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RuntimeError(f"request {request.request_id.hex()} was to end with this token")
        self._members.remove(member)
        self._num_by_class[request.priority] -= 1
        # Context tokens of a request that has ended are of no step to come: prompt and output but the last.
        self._num_context_tokens -= request.num_tokens - 1
        member.bucket.remove(member)
        return request
