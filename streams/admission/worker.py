"""One run as the router sees it: its last figures, and what was dispatched to it since.

Heartbeats are up to 100 ms old. A worker says up to which mailbox offset its figures go; what lies above is
added to them, whoever dispatched it: an ack tells how many others did. What usage rows say has ended since
the last heartbeat is taken off.
"""

from collections import deque
from dataclasses import dataclass, field

from schemas.fleet import CanaryStatus
from schemas.priority import PriorityClass
from schemas.records import Heartbeat, InferenceRequest, WorkerStatus
from streams.admission.affinity import PromptPrefix, SentPrefixes, cached_tokens
from streams.admission.shares import Share

# Queued prompt tokens that weigh as much as a full KV pool or a full batch: a few steps of prefill.
PREFILL_SCALE = 2048
# Batch leaves this part of the KV blocks and of the places in the batch free, so that an interactive prompt
# finds room at once. With no places kept, time to first token beside batch was 1.8 times that of alone at p99
# in the scenario `waves`; with these 1.1 times, for 3 % of the batch work.
BATCH_WATERMARK = 0.1
# Beyond what keeps a worker busy between two heartbeats, prompts queue here and not there: here they can be
# reordered, evicted and sent elsewhere. In the scenario `one_node`, offered three times what it carries, the
# 8b model's p95 to first token was 4.8 s without a bound; 150 ms cost no throughput, 100 ms 14 %.
PREFILL_AHEAD_S = 0.15
_UNFIT = frozenset({CanaryStatus.FAILED, CanaryStatus.ENGINE_STALLED})


@dataclass(slots=True, eq=False)
class InFlight:
    """A dispatch that the worker's heartbeat does not count yet. `offset` is None until the ack.

    `cached_tokens` of its prompt are expected to be found there; `prefill_tokens` are the others.
    """

    priority: int
    blocks: int
    prefill_tokens: int
    cached_tokens: int = 0
    offset: int | None = None


def _empty_mailboxes() -> tuple[deque[InFlight], ...]:
    return tuple(deque() for _ in PriorityClass)


@dataclass(slots=True, eq=False)
class Worker:
    """`suspects` are requests there that runs were lost under before. `heard_at`: broker time of `heartbeat`
    (ms). `prefill_slowness`, `step_slowness`: 1 for the fastest of the model's workers, 2 at half its speed.
    `unseen_seqs`: dispatches of other processes that the heartbeat does not count."""

    slot: int
    epoch: int
    heartbeat: Heartbeat
    status: WorkerStatus
    draining: bool
    heard_at: int = 0
    in_flight: tuple[deque[InFlight], ...] = field(default_factory=_empty_mailboxes)
    in_flight_seqs: int = 0
    in_flight_blocks: int = 0
    unseen_seqs: int = 0
    ended_seqs: int = 0
    ended_blocks: int = 0
    prefill_slowness: float = 1.0
    step_slowness: float = 1.0
    suspects: set[bytes] = field(default_factory=set)
    sent: SentPrefixes = field(default_factory=SentPrefixes)
    _next_offsets: list[int] = field(default_factory=lambda: [0] * len(PriorityClass))
    _in_flight_prefill: list[int] = field(default_factory=lambda: [0] * len(PriorityClass))
    _num_acked: list[int] = field(default_factory=lambda: [0] * len(PriorityClass))

    @property
    def takes_requests(self) -> bool:
        return not (self.draining or self.status.draining or self.status.canary in _UNFIT)

    @property
    def num_seqs(self) -> int:
        """Sequences that run, wait or are on their way there."""
        return max(0, self._told_seqs + self.in_flight_seqs + self.unseen_seqs)

    @property
    def free_blocks(self) -> int:
        """KV blocks that neither a sequence, nor a prompt that waits there, nor a dispatch has claim to."""
        taken = self.in_flight_blocks
        if self.unseen_seqs and self.in_flight_seqs:
            # Those of others are taken to be like ours.
            taken += taken * self.unseen_seqs // self.in_flight_seqs
        return min(self.status.num_blocks, self._told_free_blocks - taken)

    @property
    def in_flight_prefill(self) -> int:
        """Prompt tokens to be computed of what is on its way."""
        return sum(self._in_flight_prefill)

    @property
    def load(self) -> float:
        """KV in use, batch in use, prompt tokens ahead, each against what is much; lower is better."""
        status = self.status
        prefill = status.queued_prefill_tokens + self.in_flight_prefill
        return (
            1.0
            - self.free_blocks / max(1, status.num_blocks)
            + self.num_seqs / max(1, status.max_num_seqs) * self.step_slowness
            + prefill / PREFILL_SCALE * self.prefill_slowness
        )

    @property
    def max_tokens(self) -> int:
        """The longest sequence it can ever hold, prompt and output."""
        return min(self.status.max_model_len, self.status.num_blocks * self.status.block_size + 1)

    def fits(self, request: InferenceRequest) -> bool:
        """Whether it could run there with nothing else; output is cut at the context's end."""
        prompt, status = len(request.prompt_token_ids), self.status
        longest = min(prompt + request.sampling.max_tokens, status.max_model_len)
        return prompt < status.max_model_len and longest <= self.max_tokens

    def has_room(self, request: InferenceRequest, expected_output_tokens: int, share: Share | None) -> bool:
        """Whether it could run there now, within this process's share of the room (None: all of it)."""
        blocks, free = self.blocks_for(request, expected_output_tokens), self.free_blocks
        if self.num_seqs >= self.status.max_num_seqs or blocks > free:
            return False
        if request.priority == PriorityClass.BATCH and not self.spares(blocks):
            return False
        if self.is_behind(request):
            return False
        if share is None:
            return True
        seats = share.of(self.status.max_num_seqs - self._told_seqs, self.slot, self.heard_at)
        if self.in_flight_seqs >= seats:
            return False
        # One may be larger than the share: else it would wait until nobody else does.
        mine = share.of(self._told_free_blocks, self.slot, self.heard_at)
        return not self.in_flight_blocks or self.in_flight_blocks + blocks <= mine

    def spares(self, blocks: int) -> bool:
        """Whether batch work of `blocks` leaves room for interactive prompts, of which none waits there."""
        if self.num_seqs == 0:
            return True
        status = self.status
        if status.num_waiting[PriorityClass.INTERACTIVE] or self.num_seqs >= (
            (1 - BATCH_WATERMARK) * status.max_num_seqs
        ):
            return False
        return self.free_blocks - blocks >= BATCH_WATERMARK * status.num_blocks

    def is_behind(self, request: InferenceRequest) -> bool:
        """Whether the prompt would wait there, because it and those ahead take longer than PREFILL_AHEAD_S.

        Ahead are those of its class and higher ones that wait or are on their way. Of a long prompt half of
        that time counts: it must go at some time.
        """
        status, up_to = self.status, request.priority + 1
        num_ahead, num_waiting = sum(status.num_waiting[:up_to]), sum(status.num_waiting)
        if not num_ahead and not any(self.in_flight[:up_to]):
            return False
        most = max(PREFILL_SCALE, PREFILL_AHEAD_S * status.prefill_tokens_per_s)
        # Each running sequence counts one token among the queued ones: its next.
        queued = status.queued_prefill_tokens - status.num_running
        ahead = sum(self._in_flight_prefill[:up_to]) + (
            queued * num_ahead / num_waiting if num_waiting else queued
        )
        own = len(request.prompt_token_ids) + len(request.output_token_ids)
        return ahead + min(own, most / 2) > most

    def blocks_for(self, request: InferenceRequest, expected_output_tokens: int) -> int:
        """Blocks that it is expected to fill; never more than the worker has, so an idle one takes any."""
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + expected_output_tokens
        return min(-(-tokens // self.status.block_size), self.status.num_blocks)

    def cached_tokens(self, prefix: PromptPrefix) -> int:
        """How many of the prompt's tokens it is expected to have cached by the time they are needed."""
        return cached_tokens(self.status.prefix_sketch, self.sent, prefix)

    def prefill_ms(self, tokens: int = 0) -> float | None:
        """Until the prompts that it counts and `tokens` more are computed, at its rate. None: not known."""
        status = self.status
        if status.prefill_tokens_per_s <= 0:
            return None
        tokens += status.queued_prefill_tokens + self.in_flight_prefill
        return tokens * 1_000 / status.prefill_tokens_per_s + status.step_time_ms

    def update(self, heartbeat: Heartbeat, status: WorkerStatus, heard_at: int) -> None:
        """Takes newer figures, and drops from its own counts what these hold."""
        if status.prefix_sketch is not self.status.prefix_sketch:
            self.sent.told()
        self.heartbeat, self.status, self.heard_at = heartbeat, status, heard_at
        self.ended_seqs = self.ended_blocks = 0
        for priority, dispatched in enumerate(self.in_flight):
            while (
                dispatched
                and dispatched[0].offset is not None
                and self.counts(priority, dispatched[0].offset)
            ):
                self._uncount(dispatched.popleft())
        self._count_unseen()

    def counts(self, priority: int, offset: int) -> bool:
        """Whether the last heartbeat's figures hold the dispatch at `offset`."""
        return offset < self.status.mailbox_offsets[priority]

    def add(self, entry: InFlight) -> None:
        self.in_flight[entry.priority].append(entry)
        self.in_flight_seqs += 1
        self.in_flight_blocks += entry.blocks
        self._in_flight_prefill[entry.priority] += entry.prefill_tokens

    def acked(self, entry: InFlight, offset: int) -> None:
        """The dispatch lies at `offset` of its mailbox partition."""
        next_offsets = self._next_offsets
        next_offsets[entry.priority] = max(next_offsets[entry.priority], offset + 1)
        if self.counts(entry.priority, offset):
            self.remove(entry)
        else:
            entry.offset = offset
            self._num_acked[entry.priority] += 1
        self._count_unseen()

    def remove(self, entry: InFlight) -> None:
        """Fine for an entry that is no longer there."""
        if entry in self.in_flight[entry.priority]:
            self.in_flight[entry.priority].remove(entry)
            self._uncount(entry)

    @property
    def _told_seqs(self) -> int:
        status = self.status
        return status.num_running + sum(status.num_waiting) - self.ended_seqs

    @property
    def _told_free_blocks(self) -> int:
        status = self.status
        return status.free_blocks - -(-status.queued_prefill_tokens // status.block_size) + self.ended_blocks

    def _uncount(self, entry: InFlight) -> None:
        self.in_flight_seqs -= 1
        self.in_flight_blocks -= entry.blocks
        self._in_flight_prefill[entry.priority] -= entry.prefill_tokens
        if entry.offset is not None:
            self._num_acked[entry.priority] -= 1

    def _count_unseen(self) -> None:
        # What lies between the heartbeat's offset and our newest ack, less what of it is ours.
        self.unseen_seqs = 0
        for read, end, ours in zip(
            self.status.mailbox_offsets, self._next_offsets, self._num_acked, strict=False
        ):
            if end > read:
                self.unseen_seqs += max(0, end - read - ours)
