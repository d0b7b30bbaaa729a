"""Leaps: many decode steps at once, while nothing but decoding can happen in an engine.

As long as every request in an engine is a running one that lacks its next token, each step schedules all of
them for one token. Then what a step costs is known in closed form, blocks are due at known steps, and ends
come at known steps. A `DecodeRun` plans such steps without touching any request, carries out as many of them
as came to pass, and leaves the scheduler as the same number of `schedule` and `update_from_output` would:
it makes the same calls to pools, budget, step-time model and meter, in the same order.

While prompts are computed beside the decodes, it goes on step by step: the scheduler plans the prompts, and
the decodes still go by what is known of them. A request joins when its prompt has ended. Lower classes stand
still beside interactive prompts where the scheduler holds them: they are a group of their own.

Not planned are steps that would preempt, or in which a part of the lower classes would be held back.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from itertools import accumulate

from infra.simulator.decode_group import DecodeGroup, Member, order
from infra.simulator.leap_rules import holds_all_lower, is_in_time, is_timed
from schemas.priority import PriorityClass
from workers.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from workers.request import FinishReason, Request, RequestOutput
from workers.roofline import StepCosts
from workers.running_batch import batch_order
from workers.scheduler import Scheduler
from workers.step_plan import StepPlan

# A plan that is cut short was made for nothing.
_MAX_PLANNED = 32
_INTERACTIVE = PriorityClass.INTERACTIVE


class DecodeRun:
    """One stretch of decoding. `ends` are the times at which the planned steps end, in seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        roofline: StepCosts,
        num_left: Callable[[Request], int],
        token_id: int,
        last_token_id: int,
    ) -> None:
        """Of all that runs in `scheduler`; `may_begin` must hold. `num_left(request)` tokens are to come of
        a request, `last_token_id` is the last of them, the others are `token_id`."""
        self.ends: list[float] = []
        self._seconds: list[float] = []
        self._scheduler = scheduler
        self._kv = scheduler.kv_cache_manager
        self._roofline = roofline
        self._last_token_id = last_token_id
        self._num_left = num_left
        self._interactive = DecodeGroup(self._kv.block_size, token_id)
        self._lower = DecodeGroup(self._kv.block_size, token_id)
        self._stepping: list[DecodeGroup] = []
        # Those whose prompts are being computed, in the order of the batch.
        self._prefills: list[Request] = []
        for request in scheduler.running:
            if request.num_tokens - request.num_computed_tokens == 1:
                self._group_of(request).join(request, num_left(request))
            else:
                self._prefills.append(request)

    @property
    def groups(self) -> list[DecodeGroup]:
        """Those that have members, in the order of the batch."""
        return [group for group in (self._interactive, self._lower) if group.members]

    @property
    def stepping(self) -> list[DecodeGroup]:
        """Of the step that `schedule` began, those that it decodes."""
        return self._stepping

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing but what it decodes."""
        return not self._prefills and not self._scheduler.num_waiting

    def plan(self, now: float) -> bool:
        """Plans steps from `now` on, up to the next end of a request. False if not even one goes so."""
        groups = self.groups
        if not groups:
            return False
        num_seqs, num_context_tokens = _load(groups)
        most = min(_MAX_PLANNED, *[group.num_steps_left for group in groups])
        if is_timed(self._scheduler, len(groups) > 1):
            if not is_in_time(self._scheduler, num_seqs, num_context_tokens):
                return False
            most = 1
        num_steps = self._num_steps_with_blocks(groups, num_seqs, most)
        first = num_context_tokens + num_seqs
        contexts = range(first, first + num_steps * num_seqs, num_seqs)
        self._seconds = list(map(self._roofline.decode_seconds(num_seqs), contexts))
        _, *self.ends = accumulate(self._seconds, initial=now)
        return bool(self.ends)

    def _num_steps_with_blocks(self, groups: list[DecodeGroup], num_seqs: int, most: int) -> int:
        """For how many of the next steps, `most` at most, there are blocks."""
        block_size, free = self._kv.block_size, self._kv.num_free_blocks
        if free >= num_seqs * -(-most // block_size):
            return most
        for num_steps in range(most):
            free -= sum(len(group.due(num_steps + 1)) for group in groups)
            if free < 0:
                return num_steps
        return most

    def cut(self, now: float) -> None:
        """Something comes at `now`: the step that is being computed is the last one of the plan."""
        num_kept = bisect_right(self.ends, now) + 1
        del self.ends[num_kept:], self._seconds[num_kept:]

    def carry_out(self, num_steps: int) -> list[Request]:
        """The first `num_steps` of the plan. Returns the requests that ended with the last of them."""
        groups = self.groups
        num_seqs, context = _load(groups)
        seconds = self._seconds[:num_steps]
        contexts = range(context + num_seqs, context + num_seqs * (num_steps + 1), num_seqs)
        # As `Scheduler.observe` does. Nobody asks meter or model before the last of these steps is over.
        self._scheduler.meter.add_decodes(num_seqs, seconds)
        self._scheduler.step_time.observe_steps(num_seqs, 0, zip(contexts, seconds, strict=True))
        del self.ends[:num_steps], self._seconds[:num_steps]
        at_once = num_steps if self._kv.hasher is None else 1
        ended: list[Request] = []
        for _ in range(0, num_steps, at_once):
            self._grow([(g, m, n) for n in range(1, at_once + 1) for g in groups for m in g.due(n)])
            ended += self._book(groups, at_once)
        return ended

    def can_step(self) -> bool:
        """Whether the next step goes beside prompts: nobody can give way to them, and of the lower classes
        all go along or none."""
        scheduler, kv, groups = self._scheduler, self._kv, self.groups
        if not groups:
            return False
        num_due = sum(len(group.due(1)) for group in groups)
        for request in self._prefills:
            if request.num_tokens - request.num_computed_tokens == 1:
                return False  # decoded like the members, but with a time of its own
            num_due += kv.num_blocks_for(request.num_tokens) - len(request.block_table)
        if self._lower.members:
            if self._has_interactive_prompt() and not holds_all_lower(scheduler, self._lower.num_by_class):
                return False
            if is_timed(scheduler, len(groups) > 1) and not is_in_time(scheduler, *_load(groups)):
                return False
        return scheduler.has_room_for_all(num_due)

    def _has_interactive_prompt(self) -> bool:
        if self._prefills and self._prefills[0].priority is _INTERACTIVE:
            return True
        return self._scheduler.num_waiting_by_class()[_INTERACTIVE] > 0

    def schedule(self) -> SchedulerOutput:
        """Begins a step beside prompts; `can_step` must hold."""
        self._stepping = []
        batch = self._scheduler.schedule_prompts(self._add_interactive, self._add_lower, self._prefills)
        for request in batch.admitted:
            insort(self._prefills, request, key=batch_order)
        return batch

    def _add_interactive(self, plan: StepPlan) -> None:
        self._add(self._interactive, plan)

    def _add_lower(self, plan: StepPlan) -> None:
        self._add(self._lower, plan)

    def _add(self, group: DecodeGroup, plan: StepPlan) -> None:
        members = group.members
        if members:
            self._stepping.append(group)
            self._grow([(group, member, 1) for member in group.due(1)])
            plan.decodes += [member.sequence for member in members]
            plan.add_context(group.num_context_tokens + len(members))

    def chunks(self, batch: SchedulerOutput) -> list[ScheduledSequence]:
        """Of a step that it has begun, the prompts' part."""
        return batch.scheduled[sum(len(group.members) for group in self._stepping) :]

    def update_from_output(
        self, batch: SchedulerOutput, sampled: RunnerOutput, now: float
    ) -> tuple[list[Request], list[RequestOutput]]:
        """Books the step that `schedule` began, which ends `now`: `sampled` are the tokens of its `chunks`.
        Returns who ended, and the outputs of the chunks. Those whose prompts have ended join."""
        chunks = self.chunks(batch)
        ended = self._book(self._stepping, 1)
        outputs = self._scheduler.update_from_output(SchedulerOutput(chunks), sampled)
        for sequence in chunks:
            request = sequence.request
            if not sequence.samples:
                continue
            if request.finish_reason is not None:
                self._prefills.remove(request)
                continue
            group = self._group_of(request)
            if not group.members:
                group.at = now
            # One of a group that stood still has a time of its own: `can_step` finds it among the prompts.
            if group.at == now:
                self._prefills.remove(request)
                group.join(request, self._num_left(request))
        return ended, outputs

    def close(self) -> list[tuple[Request, float]]:
        """Brings every request in it up to date, for the scheduler to go on with. Returns them, and when they
        had their last tokens."""
        for group in self.groups:
            for member in group.members:
                group.sync(member, group.num_done)
        return [(member.request, group.at) for group in self.groups for member in group.members]

    def _group_of(self, request: Request) -> DecodeGroup:
        return self._interactive if request.priority is _INTERACTIVE else self._lower

    def _grow(self, due: list[tuple[DecodeGroup, Member, int]]) -> None:
        """Gives each member the block that it needs some steps ahead, in the order of the steps."""
        budget, running = self._scheduler.budget, self._scheduler.running
        grown = self._kv.append_blocks([member.request for _, member, _ in due])
        for request, (group, member, num_ahead) in zip(grown, due, strict=True):
            if len(request.block_table) > request.num_expected_blocks:
                # It is longer than was expected: what is expected now?
                group.sync(member, group.num_done + num_ahead - 1)
                budget.on_allocated(request, 1)
            else:
                running.on_allocated(request, 1)

    def _book(self, groups: Iterable[DecodeGroup], num_steps: int) -> list[Request]:
        """Steps of all members, who have the blocks. With prefix caching one, otherwise up to the next end.
        Returns the requests that ended with the last."""
        ended: list[Request] = []
        for group in groups:
            ending = group.advance(num_steps)
            if self._kv.hasher is None:
                ended += [self._end(group, member) for member in ending]
                continue
            # Those whose block is full now. At once: a block of the same hash may be evicted later.
            for member in sorted({*group.due(1), *ending}, key=order):
                if member.end == group.num_done:
                    ended.append(self._end(group, member))
                else:
                    group.sync(member, group.num_done)
                    self._kv.cache_computed(member.request)
        return ended

    def _end(self, group: DecodeGroup, member: Member) -> Request:
        request = member.request
        group.sync(member, member.end - 1)
        # The last token is one that the scheduler takes itself: it books the end.
        sampled = RunnerOutput([self._last_token_id])
        batch = SchedulerOutput([member.sequence])
        (output,) = self._scheduler.update_from_output(batch, sampled)
        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RuntimeError(f"request {request.request_id.hex()} was to end with this token")
        group.leave(member)
        return request


def _load(groups: list[DecodeGroup]) -> tuple[int, int]:
    """Members, and their context tokens."""
    if len(groups) == 1:
        return len(groups[0].members), groups[0].num_context_tokens
    return sum(len(g.members) for g in groups), sum(g.num_context_tokens for g in groups)
