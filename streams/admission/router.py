"""Picks the worker for a request, late: only one that has room now.

Heartbeats are up to 100 ms old, so the router counts what it has dispatched since: a worker says up to
which mailbox offset its figures go, and what lies above is added to them. What usage rows say has ended
since the last heartbeat is taken off.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from schemas.fleet import CanaryStatus, Member
from schemas.priority import PriorityClass
from schemas.records import Heartbeat, InferenceRequest, WorkerStatus

# Queued prompt tokens that weigh as much as a full KV pool or a full batch: a few steps of prefill.
PREFILL_SCALE = 2048
# Batch leaves this part of the KV blocks free, so that an interactive prompt finds room without preemption.
BATCH_WATERMARK = 0.1
# More than any load: with another suspect only where there is no other room.
_APART = 1e6
_SUSPECT_ATTEMPT = 3
_UNFIT = frozenset({CanaryStatus.FAILED, CanaryStatus.ENGINE_STALLED})


class Blocked(Enum):
    """Why no worker takes a request now."""

    NO_WORKER = auto()  # none serves the model, or all that do are excluded
    NO_ROOM = auto()


@dataclass(slots=True, eq=False)
class InFlight:
    """A dispatch that the worker's heartbeat does not count yet. `offset` is None until the ack."""

    priority: int
    blocks: int
    prefill_tokens: int
    offset: int | None = None


def _empty_mailboxes() -> tuple[deque[InFlight], ...]:
    return tuple(deque() for _ in PriorityClass)


@dataclass(slots=True, eq=False)
class Worker:
    """One run as the router sees it. `suspects` are requests there that runs were lost under before."""

    slot: int
    epoch: int
    heartbeat: Heartbeat
    status: WorkerStatus
    draining: bool
    in_flight: tuple[deque[InFlight], ...] = field(default_factory=_empty_mailboxes)
    in_flight_seqs: int = 0
    in_flight_blocks: int = 0
    in_flight_prefill: int = 0
    ended_seqs: int = 0
    ended_blocks: int = 0
    suspects: set[bytes] = field(default_factory=set)

    @property
    def takes_requests(self) -> bool:
        return not (self.draining or self.status.draining or self.status.canary in _UNFIT)

    @property
    def num_seqs(self) -> int:
        """Sequences that run, wait or are on their way there."""
        status = self.status
        seqs = status.num_running + sum(status.num_waiting) + self.in_flight_seqs - self.ended_seqs
        return max(0, seqs)

    @property
    def free_blocks(self) -> int:
        """KV blocks that neither a sequence, nor a prompt that waits there, nor a dispatch has claim to."""
        status = self.status
        waiting = -(-status.queued_prefill_tokens // status.block_size)
        free = status.free_blocks - waiting - self.in_flight_blocks + self.ended_blocks
        return min(status.num_blocks, free)

    @property
    def load(self) -> float:
        """The routing score, lower is better: KV in use, batch in use, prompt tokens ahead."""
        status = self.status
        prefill = status.queued_prefill_tokens + self.in_flight_prefill
        return (
            1.0
            - self.free_blocks / max(1, status.num_blocks)
            + self.num_seqs / max(1, status.max_num_seqs)
            + prefill / PREFILL_SCALE
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

    def spares(self, blocks: int) -> bool:
        """Whether batch work of `blocks` leaves room for interactive prompts, of which none waits there."""
        if self.num_seqs == 0:
            return True
        kept = BATCH_WATERMARK * self.status.num_blocks
        return self.status.num_waiting[PriorityClass.INTERACTIVE] == 0 and self.free_blocks - blocks >= kept

    def blocks_for(self, request: InferenceRequest, expected_output_tokens: int) -> int:
        """Blocks that it is expected to fill; never more than the worker has, so an idle one takes any."""
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + expected_output_tokens
        return min(-(-tokens // self.status.block_size), self.status.num_blocks)

    def update(self, heartbeat: Heartbeat, status: WorkerStatus) -> None:
        """Takes newer figures, and drops from its own counts what these hold."""
        self.heartbeat, self.status = heartbeat, status
        self.ended_seqs = self.ended_blocks = 0
        for priority, dispatched in enumerate(self.in_flight):
            while (
                dispatched
                and dispatched[0].offset is not None
                and self.counts(priority, dispatched[0].offset)
            ):
                self._uncount(dispatched.popleft())

    def counts(self, priority: int, offset: int) -> bool:
        """Whether the last heartbeat's figures hold the dispatch at `offset`."""
        return offset < self.status.mailbox_offsets[priority]

    def add(self, entry: InFlight) -> None:
        self.in_flight[entry.priority].append(entry)
        self.in_flight_seqs += 1
        self.in_flight_blocks += entry.blocks
        self.in_flight_prefill += entry.prefill_tokens

    def remove(self, entry: InFlight) -> None:
        """Fine for an entry that is no longer there."""
        if entry in self.in_flight[entry.priority]:
            self.in_flight[entry.priority].remove(entry)
            self._uncount(entry)

    def _uncount(self, entry: InFlight) -> None:
        self.in_flight_seqs -= 1
        self.in_flight_blocks -= entry.blocks
        self.in_flight_prefill -= entry.prefill_tokens


def is_suspect(request: InferenceRequest) -> bool:
    """Two runs did not end it. It may be what they died of: it is kept apart from another such request, which
    its owner asks for too as far as it knows of them (`excluded_slots`)."""
    return request.attempt >= _SUSPECT_ATTEMPT


class Router:
    """The live workers by model."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._by_model: dict[str, list[Worker]] = {}

    def update(self, members: Iterable[Member]) -> None:
        """Takes the workers that live now; what was in flight to others is forgotten with them."""
        workers: dict[int, Worker] = {}
        for member in members:
            heartbeat = member.heartbeat
            if heartbeat is None or heartbeat.worker is None:
                continue
            worker = self._workers.get(member.slot)
            if worker is None or worker.epoch != member.epoch:
                worker = Worker(member.slot, member.epoch, heartbeat, heartbeat.worker, member.draining)
            elif worker.heartbeat is not heartbeat:
                worker.update(heartbeat, heartbeat.worker)
            worker.draining = member.draining
            workers[member.slot] = worker
        self._workers = workers
        self._by_model = {}
        for worker in workers.values():
            if worker.takes_requests:
                self._by_model.setdefault(worker.status.model, []).append(worker)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def workers(self, model: str) -> list[Worker]:
        """Those that take requests for the model."""
        return self._by_model.get(model, [])

    def kv_use(self, model: str) -> float:
        """The part of the KV blocks of a model's workers that is in use or claimed; 0 without workers."""
        workers = self.workers(model)
        blocks = sum(worker.status.num_blocks for worker in workers)
        return 1.0 - sum(worker.free_blocks for worker in workers) / blocks if blocks else 0.0

    def choose(self, request: InferenceRequest, expected_output_tokens: int) -> Worker | Blocked:
        """The least loaded worker with room for the request. O(workers)."""
        best: Worker | None = None
        best_load = 0.0
        blocked = Blocked.NO_WORKER
        for worker in self._by_model.get(request.model, ()):
            if worker.slot in request.excluded_slots or worker.epoch in request.lost_epochs:
                continue
            if not worker.fits(request):
                continue
            blocked = Blocked.NO_ROOM
            if worker.num_seqs >= worker.status.max_num_seqs:
                continue
            blocks = worker.blocks_for(request, expected_output_tokens)
            if blocks > worker.free_blocks:
                continue
            if request.priority == PriorityClass.BATCH and not worker.spares(blocks):
                continue
            load = worker.load
            if is_suspect(request) and worker.suspects - {request.request_id}:
                load += _APART
            if best is None or load < best_load:
                best, best_load = worker, load
        return blocked if best is None else best

    def dispatch(self, worker: Worker, request: InferenceRequest, expected_output_tokens: int) -> InFlight:
        """Counts the request at the worker until a heartbeat does."""
        entry = InFlight(
            priority=request.priority,
            blocks=worker.blocks_for(request, expected_output_tokens),
            prefill_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
        )
        worker.add(entry)
        if is_suspect(request):
            worker.suspects.add(request.request_id)
        return entry

    def acked(self, worker: Worker, entry: InFlight, offset: int) -> None:
        """The dispatch lies at `offset` of its mailbox partition."""
        entry.offset = offset
        if worker.counts(entry.priority, offset):
            worker.remove(entry)

    def billed(self, slot: int, epoch: int, request_id: bytes) -> None:
        """A usage row: the request does no harm to that run any more."""
        worker = self._workers.get(slot)
        if worker is not None and worker.epoch == epoch:
            worker.suspects.discard(request_id)

    def ended(self, slot: int, epoch: int, tokens: int) -> None:
        """A request of `tokens` (prompt and output) that this router dispatched has ended at that run."""
        worker = self._workers.get(slot)
        if worker is not None and worker.epoch == epoch:
            worker.ended_seqs += 1
            worker.ended_blocks += -(-tokens // worker.status.block_size)
