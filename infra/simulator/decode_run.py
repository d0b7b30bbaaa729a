"""Leaps: many decode steps at once, while nothing but decoding can happen in an engine.

As long as every request in an engine is a running one that lacks its next token, each step schedules all of
them for one token. Then what a step costs is known in closed form, blocks are due at known steps, and ends
come at known steps. A `DecodeRun` plans such steps without touching any request, carries out as many of them
as came to pass, and leaves the scheduler as the same number of `schedule` and `update_from_output` would:
it makes the same calls to pools, budget, step-time model and meter, in the same order.

Not planned are steps that would preempt, or that the inter-token target would hold a lower class back in.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from schemas.priority import PriorityClass
from workers.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from workers.request import FinishReason, Request
from workers.roofline import StepCosts
from workers.scheduler import Scheduler

# Relative. The scheduler adds up what a step takes sequence by sequence; in closed form the last bits differ.
_CLOSE_CALL = 1e-9
# A plan that is cut short was made for nothing.
_MAX_PLANNED = 32


@dataclass(slots=True, eq=False)
class _Member:
    """A running request. `end` is the step that gives its last token; up to `synced` it has its tokens.
    `bucket` has those whose blocks are due in the same steps."""

    request: Request
    end: int
    bucket: list["_Member"]
    synced: int = 0


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
        """Of all that runs in `scheduler`; `can_run` must hold. `num_left(request)` tokens are to come of a
        request, `last_token_id` is the last of them, the others are `token_id`."""
        self.num_done = 0
        self.ends: list[float] = []
        self._seconds: list[float] = []
        self._scheduler = scheduler
        self._kv = scheduler.kv_cache_manager
        self._roofline = roofline
        self._token_id, self._last_token_id = token_id, last_token_id
        self._buckets: list[list[_Member]] = [[] for _ in range(self._kv.block_size)]
        self._num_by_class = [0] * len(PriorityClass)
        self._members: list[_Member] = []
        block_size, buckets, num_by_class = self._kv.block_size, self._buckets, self._num_by_class
        num_context_tokens = 0
        for request in scheduler.running:
            num_computed = request.num_computed_tokens
            num_context_tokens += num_computed
            # A block is due where the table is full, and then every block_size steps.
            bucket = buckets[(1 - num_computed) % block_size]
            member = _Member(request, num_left(request), bucket)
            self._members.append(member)
            bucket.append(member)
            num_by_class[request.priority] += 1
        self._num_context_tokens = num_context_tokens
        # The next to end is the last; of those that end together, the first in the batch.
        self._by_end = sorted(self._members, key=attrgetter("end"))
        self._by_end.reverse()

    @staticmethod
    def can_run(scheduler: Scheduler) -> bool:
        """Whether all requests are running ones that lack one token, no block is held beyond the next, and
        the first step goes as a run's step does."""
        running = scheduler.running
        if scheduler.num_waiting or not len(running):
            return False
        newest = running.last  # mostly the one whose prompt is being computed
        if newest.num_tokens - newest.num_computed_tokens != 1:
            return False
        block_size = scheduler.kv_cache_manager.block_size
        num_context_tokens = 0
        for request in running:
            num_computed = request.num_computed_tokens
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            if num_tokens - num_computed != 1:
                return False
            if not 0 <= len(request.block_table) * block_size - num_computed < block_size:
                return False
            num_context_tokens += num_computed
        mixed = running[0].priority is PriorityClass.INTERACTIVE and running.has_below(
            PriorityClass.INTERACTIVE
        )
        return not _is_timed(scheduler, mixed) or _is_in_time(scheduler, len(running), num_context_tokens)

    @property
    def num_by_class(self) -> list[int]:
        """Requests that run, by class."""
        return self._num_by_class

    def positions(self) -> list[tuple[Request, int]]:
        """Each request that runs, and the output position of its next token."""
        done = self.num_done
        return [(m.request, len(m.request.output_token_ids) + done - m.synced) for m in self._members]

    def plan(self, now: float) -> bool:
        """Plans steps from `now` on, up to the next end of a request. False if not even one goes so."""
        num_seqs = len(self._members)
        if not num_seqs:
            return False
        step, last = self.num_done, min(self._by_end[-1].end, self.num_done + _MAX_PLANNED)
        interactive, *lower = self._num_by_class
        if _is_timed(self._scheduler, interactive > 0 and any(lower)):
            if not _is_in_time(self._scheduler, num_seqs, self._num_context_tokens):
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
        caching, cache_computed = self._kv.hasher is not None, self._kv.cache_computed
        seconds, context = self._seconds[:num_steps], self._num_context_tokens
        first, step = self.num_done + 1, self.num_done + len(seconds)
        if caching:
            for at in range(first, step + 1):
                self._grow([(member, at) for member in buckets[at % block_size]])
                # Those whose block is full now. At once: a block of the same hash may be evicted later.
                for member in buckets[(at + 1) % block_size]:
                    if member.end > at:
                        self._sync(member, at)
                        cache_computed(member.request)
        else:
            self._grow([(m, at) for at in range(first, step + 1) for m in buckets[at % block_size]])
        contexts = range(context + num_seqs, context + num_seqs * (len(seconds) + 1), num_seqs)
        # As `Scheduler.observe` does. Nobody asks meter or model before the last of these steps is over.
        self._scheduler.meter.add_decodes(num_seqs, seconds)
        self._scheduler.step_time.observe_steps(num_seqs, 0, zip(contexts, seconds, strict=True))
        self.num_done, self._num_context_tokens = step, context + num_seqs * len(seconds)
        del self.ends[:num_steps], self._seconds[:num_steps]
        ended: list[Request] = []
        while self._by_end and self._by_end[-1].end == step:
            ended.append(self._end(self._by_end.pop()))
        return ended

    def close(self) -> None:
        """Brings every request up to date, for the scheduler to go on with."""
        for member in self._members:
            self._sync(member, self.num_done)

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

    def _end(self, member: _Member) -> Request:
        request, step = member.request, member.end
        self._sync(member, step - 1)
        # The last token is one that the scheduler takes itself: it books the end.
        sampled = RunnerOutput([self._last_token_id])
        batch = SchedulerOutput([ScheduledSequence(request, 1, True)])
        (output,) = self._scheduler.update_from_output(batch, sampled)
        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RuntimeError(f"request {request.request_id.hex()} was to end with this token")
        self._members.remove(member)
        self._num_by_class[request.priority] -= 1
        # Context tokens of a request that has ended are of no step to come: prompt and output but the last.
        self._num_context_tokens -= request.num_tokens - 1
        member.bucket.remove(member)
        return request


def _is_timed(scheduler: Scheduler, mixed: bool) -> bool:
    """Whether the inter-token target bounds a batch that is `mixed`, of interactive and lower classes."""
    return mixed and scheduler.config.inter_token_target_ms > 0


def _is_in_time(scheduler: Scheduler, num_seqs: int, num_context_tokens: int) -> bool:
    """Whether the inter-token target lets all of the lower classes go along in the next step."""
    time = scheduler.step_time
    if num_seqs > time.max_num_seqs:
        return False
    limit = time.line_for(scheduler.config.inter_token_target_ms / 1000, False)
    return time.line(num_seqs, 0, num_context_tokens + num_seqs) < limit * (1 - _CLOSE_CALL)
