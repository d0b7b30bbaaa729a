"""One run as the router sees it: its last figures, and what was dispatched to it since.

Heartbeats are up to 100 ms old. A worker says up to which mailbox offset its figures go; what lies above is
added to them, whoever dispatched it: an ack tells how many others did. What usage rows say has ended since
the last heartbeat is taken off.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from schemas.fleet import CanaryStatus
from schemas.priority import PriorityClass
from schemas.records import Heartbeat, InferenceRequest, WorkerStatus
from streams.admission.affinity import PromptPrefix, SentPrefixes, cached_tokens
from streams.admission.in_flight import InFlight
from streams.admission.room import Lower, Part, Room
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


def _empty_mailboxes() -> tuple[deque[InFlight], ...]:
    return tuple(deque() for _ in PriorityClass)


def _no_counts() -> list[int]:
    return [0] * len(PriorityClass)


@dataclass(slots=True, eq=False)
class Worker:
    """`suspects` are requests there that runs were lost under before. `heard_at`: broker time of `heartbeat`
    (ms). `prefill_slowness`, `step_slowness`: 1 for the fastest of the model's workers, 2 at half its speed.
    `reserved`, by request_id, is kept for requests whose KV is to come from a prefill slot.
    `unseen_seqs`: dispatches of other processes that the heartbeat does not count. By class is what has ended
    since it.

    Every request looks at every worker, so what follows from all this is summed up when it changes.
    `num_seqs` run, wait or are on their way there; `free_blocks` of KV neither they nor prompts that wait
    have claim to; a sequence of more than `free_tokens` takes from lower classes what it lacks. `load` is KV
    in use, batch in use, prompt tokens ahead, each against what is much; lower is better. `max_tokens` is the
    longest sequence it can ever hold, prompt and output.
    """

    slot: int
    epoch: int
    heartbeat: Heartbeat
    status: WorkerStatus
    draining: bool
    heard_at: int = 0
    in_flight: tuple[deque[InFlight], ...] = field(default_factory=_empty_mailboxes)
    in_flight_seqs: int = 0
    in_flight_blocks: int = 0
    reserved: dict[bytes, InFlight] = field(default_factory=dict)
    reserved_blocks: int = 0
    unseen_seqs: int = 0
    ended_seqs: list[int] = field(default_factory=_no_counts)
    ended_blocks: list[int] = field(default_factory=_no_counts)
    prefill_slowness: float = 1.0
    step_slowness: float = 1.0
    suspects: set[bytes] = field(default_factory=set)
    sent: SentPrefixes = field(default_factory=SentPrefixes)
    num_seqs: int = field(default=0, init=False)
    free_blocks: int = field(default=0, init=False)
    free_tokens: float = field(default=0, init=False)
    load: float = field(default=0.0, init=False)
    max_tokens: int = field(default=0, init=False)
    _next_offsets: list[int] = field(default_factory=_no_counts)
    _in_flight_prefill: list[int] = field(default_factory=_no_counts)
    _in_flight_blocks: list[int] = field(default_factory=_no_counts)
    _num_acked: list[int] = field(default_factory=_no_counts)
    _unseen: list[int] = field(default_factory=_no_counts)
    _lower: dict[int, Lower | None] = field(default_factory=dict)
    _prefill_ahead: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sum_up()

    @property
    def takes_requests(self) -> bool:
        return not (self.draining or self.status.draining or self.status.canary in _UNFIT)

    @property
    def in_flight_prefill(self) -> int:
        """Prompt tokens to be computed of what is on its way."""
        return sum(self._in_flight_prefill)

    def fits(self, request: InferenceRequest, part: Part = Part.WHOLE) -> bool:
        """Whether it could run there with nothing else; output is cut at the context's end."""
        prompt, status = len(request.prompt_token_ids), self.status
        longest = min(prompt + request.sampling.max_tokens, status.max_model_len)
        if part is Part.PREFILL:
            longest = prompt + len(request.output_token_ids) + 1
        return prompt < status.max_model_len and longest <= self.max_tokens

    def room(
        self,
        request: InferenceRequest,
        expected_output_tokens: int,
        share: Share | None,
        part: Part = Part.WHOLE,
    ) -> Room:
        """Whether it could run there now, within this process's share of the room (None: all of it).

        What lower classes have is room, too: the worker's scheduler has them give way, the last one first,
        and they go on there, at the head of their class.
        """
        priority, blocks = request.priority, self.blocks_for(request, expected_output_tokens)
        max_num_seqs = self.status.max_num_seqs
        told_seqs, told_free = self._told_seqs, self._told_free_blocks
        flying_seqs = self.in_flight_seqs + len(self.reserved)
        flying_blocks = self.in_flight_blocks + self.reserved_blocks
        room = Room.FREE
        if num_tokens(request, expected_output_tokens) > self.free_tokens:
            lower = self.lower(priority)
            if lower is None or self.num_seqs - lower.num_seqs >= max_num_seqs:
                return Room.NONE
            if blocks > self.free_blocks + lower.blocks:
                return Room.NONE
            room = Room.TAKEN
            told_seqs -= lower.told_seqs
            told_free += lower.told_blocks
            flying_seqs -= lower.flying_seqs
            flying_blocks -= lower.flying_blocks
        if priority == PriorityClass.BATCH and not self.spares(blocks):
            return Room.NONE
        if part is not Part.DECODE and self.is_behind(request):
            return Room.NONE
        if share is None:
            return room
        if flying_seqs >= share.of(max_num_seqs - told_seqs, self.slot, self.heard_at):
            return Room.NONE
        # One may be larger than the share: else it would wait until nobody else does.
        mine = share.of(told_free, self.slot, self.heard_at)
        return Room.NONE if flying_blocks and flying_blocks + blocks > mine else room

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
        if not any(status.num_waiting[:up_to]) and not any(self.in_flight[:up_to]):
            return False
        most = max(PREFILL_SCALE, PREFILL_AHEAD_S * status.prefill_tokens_per_s)
        ahead = self.prefill_ahead(request.priority)
        # Each running sequence counts one token among them: its next.
        ahead -= sum(load.num_running for load in status.by_class[:up_to])
        own = len(request.prompt_token_ids) + len(request.output_token_ids)
        return ahead + min(own, most / 2) > most

    def blocks_for(self, request: InferenceRequest, expected_output_tokens: int) -> int:
        """Blocks that it is expected to fill; never more than the worker has, so an idle one takes any."""
        tokens = num_tokens(request, expected_output_tokens)
        return min(-(-tokens // self.status.block_size), self.status.num_blocks)

    def cached_tokens(self, prefix: PromptPrefix) -> int:
        """How many of the prompt's tokens it is expected to have cached by the time they are needed."""
        return cached_tokens(self.status.prefix_sketch, self.sent, prefix)

    def prefill_ms(self, priority: int, tokens: int = 0) -> float | None:
        """Until the prompts that it counts, of this class and higher ones, and `tokens` more are computed, at
        its rate. None: not known."""
        status = self.status
        if status.prefill_tokens_per_s <= 0:
            return None
        tokens += self.prefill_ahead(priority)
        return tokens * 1_000 / status.prefill_tokens_per_s + status.step_time_ms

    def update(self, heartbeat: Heartbeat, status: WorkerStatus, heard_at: int) -> None:
        """Takes newer figures, and drops from its own counts what these hold."""
        if status.prefix_sketch is not self.status.prefix_sketch:
            self.sent.told()
        self.heartbeat, self.status, self.heard_at = heartbeat, status, heard_at
        self.ended_seqs, self.ended_blocks = _no_counts(), _no_counts()
        if self.reserved:
            for request_id in status.handoffs:
                self.release(request_id)
        for priority, dispatched in enumerate(self.in_flight):
            while (
                dispatched
                and dispatched[0].offset is not None
                and self.counts(priority, dispatched[0].offset)
            ):
                self._uncount(dispatched.popleft())
        self._count_unseen()
        self._sum_up()

    def compared(self, prefill_slowness: float, step_slowness: float) -> None:
        """Takes how slow it is beside the fastest of its model."""
        if (prefill_slowness, step_slowness) != (self.prefill_slowness, self.step_slowness):
            self.prefill_slowness, self.step_slowness = prefill_slowness, step_slowness
            self._sum_up()

    def counts(self, priority: int, offset: int) -> bool:
        """Whether the last heartbeat's figures hold the dispatch at `offset`."""
        return offset < self.status.mailbox_offsets[priority]

    def add(self, entry: InFlight) -> None:
        self.in_flight[entry.priority].append(entry)
        self.in_flight_seqs += 1
        self.in_flight_blocks += entry.blocks
        self._in_flight_prefill[entry.priority] += entry.prefill_tokens
        self._in_flight_blocks[entry.priority] += entry.blocks
        self._sum_up()

    def reserve(self, request_id: bytes, entry: InFlight) -> None:
        """Keeps a place for a request until its KV is there. One that the heartbeat counts has its own."""
        if request_id not in self.status.handoffs:
            self.release(request_id)
            self.reserved[request_id] = entry
            self.reserved_blocks += entry.blocks
            self._sum_up()

    def release(self, request_id: bytes) -> None:
        """Fine for one that has no place."""
        if (entry := self.reserved.pop(request_id, None)) is not None:
            self.reserved_blocks -= entry.blocks
            self._sum_up()

    def ended(self, priority: int, tokens: int) -> None:
        """A sequence of `tokens` that the heartbeat counts, or will, is gone."""
        self.ended_seqs[priority] += 1
        self.ended_blocks[priority] += -(-tokens // self.status.block_size)
        self._sum_up()

    def acked(self, entry: InFlight, offset: int) -> None:
        """The dispatch lies at `offset` of its mailbox partition."""
        next_offsets = self._next_offsets
        next_offsets[entry.priority] = max(next_offsets[entry.priority], offset + 1)
        if self.counts(entry.priority, offset):
            self.remove(entry)
        else:
            entry.offset = offset
            self._num_acked[entry.priority] += 1
        before = self._unseen
        self._count_unseen()
        if self._unseen != before:
            self._sum_up()

    def remove(self, entry: InFlight) -> None:
        """Fine for an entry that is no longer there."""
        if entry in self.in_flight[entry.priority]:
            self.in_flight[entry.priority].remove(entry)
            self._uncount(entry)
            self._sum_up()

    @property
    def _told_seqs(self) -> int:
        status = self.status
        return status.num_running + sum(status.num_waiting) - sum(self.ended_seqs)

    @property
    def _told_free_blocks(self) -> int:
        status = self.status
        claimed = -(-status.queued_prefill_tokens // status.block_size)
        return status.free_blocks - claimed + sum(self.ended_blocks)

    def prefill_ahead(self, priority: int) -> int:
        """Prompt tokens that are computed before those of a request of the class that comes now."""
        ahead = self._prefill_ahead.get(priority)
        if ahead is None:
            told = sum(load.prefill_tokens for load in self.status.by_class[: priority + 1])
            ahead = self._prefill_ahead[priority] = told + sum(self._in_flight_prefill[: priority + 1])
        return ahead

    def queued_tokens(self, priority: int) -> int:
        """Of `prefill_ahead` those of prompts, without the next token of each sequence that runs."""
        running = sum(load.num_running for load in self.status.by_class[: priority + 1])
        return max(0, self.prefill_ahead(priority) - running)

    def lower(self, priority: int) -> Lower | None:
        """What lower classes have there. None: nothing, or the heartbeat does not say."""
        if priority not in self._lower:
            self._lower[priority] = self._count_lower(priority)
        return self._lower[priority]

    def _count_lower(self, priority: int) -> Lower | None:
        status, from_class = self.status, priority + 1
        told = status.by_class[from_class:]
        running = sum(load.num_running for load in told)
        told_seqs = running + sum(status.num_waiting[from_class:]) - sum(self.ended_seqs[from_class:])
        flying = sum(map(len, self.in_flight[from_class:]))
        if not told or not told_seqs + flying:
            return None
        held = sum(load.num_blocks for load in told) - sum(self.ended_blocks[from_class:])
        claimed = sum(load.prefill_tokens for load in told) // status.block_size
        return Lower(
            told_seqs,
            max(0, held) + claimed,
            flying,
            sum(self._in_flight_blocks[from_class:]),
            sum(self._unseen[from_class:]),
        )

    def _uncount(self, entry: InFlight) -> None:
        self.in_flight_seqs -= 1
        self.in_flight_blocks -= entry.blocks
        self._in_flight_prefill[entry.priority] -= entry.prefill_tokens
        self._in_flight_blocks[entry.priority] -= entry.blocks
        if entry.offset is not None:
            self._num_acked[entry.priority] -= 1

    def _count_unseen(self) -> None:
        # What lies between the heartbeat's offset and our newest ack, less what of it is ours.
        told = zip(self.status.mailbox_offsets, self._next_offsets, self._num_acked, strict=False)
        self._unseen = [max(0, end - read - ours) if end > read else 0 for read, end, ours in told]
        self.unseen_seqs = sum(self._unseen)

    def _sum_up(self) -> None:
        """Follows each change of what it is made from."""
        status = self.status
        self.num_seqs = max(0, self._told_seqs + self.in_flight_seqs + self.unseen_seqs) + len(self.reserved)
        taken = self.in_flight_blocks
        if self.unseen_seqs and self.in_flight_seqs:
            # Those of others are taken to be like ours.
            taken += taken * self.unseen_seqs // self.in_flight_seqs
        taken += self.reserved_blocks
        free = self.free_blocks = min(status.num_blocks, self._told_free_blocks - taken)
        if self.num_seqs >= status.max_num_seqs or free < 0:
            self.free_tokens = 0
        else:  # an idle one takes whatever it can hold
            self.free_tokens = free * status.block_size if free < status.num_blocks else inf
        prefill = status.queued_prefill_tokens + self.in_flight_prefill
        self.load = (
            1.0
            - free / max(1, status.num_blocks)
            + self.num_seqs / max(1, status.max_num_seqs) * self.step_slowness
            + prefill / PREFILL_SCALE * self.prefill_slowness
        )
        self.max_tokens = min(status.max_model_len, status.num_blocks * status.block_size + 1)
        self._lower.clear()
        self._prefill_ahead.clear()


def num_tokens(request: InferenceRequest, expected_output_tokens: int) -> int:
    """Of the sequence that the request is expected to become."""
    return len(request.prompt_token_ids) + len(request.output_token_ids) + expected_output_tokens
