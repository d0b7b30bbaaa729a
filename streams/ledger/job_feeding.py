"""Which line of which job is sent next, and when none is. Pure.

Tenants take turns by weight; inside one the job that expires first goes first. What is sent is bounded, a
job's and the shard's. While admission has enough batch work of a model waiting nothing more of it is sent:
that is also how a batch class that is paused, or a node that is full, is felt here. Nor is more sent than
admission reads, for what comes in heaps stands before interactive requests. A tenant that is refused for now
waits as long as its refused request.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeVar

from schemas.api.errors import ApiError
from schemas.fleet import FleetView
from schemas.priority import PriorityClass
from schemas.records import Tenant
from streams.ledger.batch_actions import AdmissionOffsets
from streams.ledger.batch_item import BatchItem
from streams.ledger.job import FileJob
from streams.ledger.job_lines import BadLine
from streams.ledger.open_request import OpenRequest, Phase

# Requests at once: enough for 1,000 lines a second whose answers take a second, and of prompts of 1,000
# tokens less than 100 MB.
MAX_OPEN = 2_048
# Of a tenant these may always be open: others whose requests are refused or stuck do not hold it up.
RESERVED_OF_TENANT = 64
MAX_OPEN_OF_JOB = 1_024
# Answers that are not written yet: while the object store is away they wait here.
MAX_UNWRITTEN_BYTES = 16 << 20
# Prompt and output tokens of a model's batch class that may wait in admission.
MAX_QUEUED_TOKENS = 262_144
# Requests that admission has not read yet: a tenth of a second of its work.
MAX_UNREAD = 128


@dataclass(slots=True)
class RunningJob:
    """A job that has its turn. `window`: lines that were read ahead, the next one last. `sent` is how many
    requests its lines are that were sent and have not ended: one each, or one for each choice."""

    job: FileJob
    window: list[BatchItem | BadLine] = field(default_factory=list)
    sent: int = 0
    stopped: ApiError | None = None

    @property
    def model(self) -> str | None:
        """That the next line is to be sent to; None where it is answered here."""
        line = self.window[-1]
        return line.model.spec.id if isinstance(line, BatchItem) and self.stopped is None else None


@dataclass(slots=True)
class Unserved:
    """Of what was sent: the prompt and output tokens, by model, that no worker is known to have, and how many
    requests admission is not known to have read."""

    tokens: Counter[str] = field(default_factory=Counter)
    unread: int = 0

    @classmethod
    def of(
        cls, requests: Iterable[OpenRequest], said: AdmissionOffsets | None, told: Mapping[str, int]
    ) -> Self:
        """`said` and `told`: what admission's last heartbeat says of the shard's requests. It is up to 100 ms
        old: what was sent since is known here alone."""
        found = cls()
        read = 0 if said is None else said.read
        for request in requests:
            if request.phase is not Phase.SENT or request.state.run is not None:
                continue
            found.add(request.item)
            offset = request.sent_offset
            if request.state.requests_offset is not None or (offset is not None and offset < read):
                found.unread -= 1
        for model, tokens in told.items():
            found.tokens[model] = max(tokens, found.tokens[model])
        return found

    def add(self, item: BatchItem) -> None:
        """It is sent."""
        self.tokens[item.model.spec.id] += item.num_tokens
        self.unread += item.num_requests

    def is_full(self, model: str) -> bool:
        """Whether no more is to be sent to it now."""
        return self.unread >= MAX_UNREAD or self.tokens[model] > MAX_QUEUED_TOKENS


R = TypeVar("R", bound=RunningJob)


class Feeder:
    def __init__(self) -> None:
        self._used: dict[str, float] = {}

    def choose(
        self,
        jobs: Iterable[R],
        tenants: Mapping[str, Tenant],
        paused: Mapping[str, int],
        full: Callable[[str], bool],
        now_ms: int,
    ) -> R | None:
        """Whose next line is to be sent; None if nobody's. `tenants`: those who are served; `full`: whether
        enough of a model waits in admission."""
        jobs = list(jobs)
        sent: dict[str, int] = {}
        for running in jobs:
            sent[running.job.tenant] = sent.get(running.job.tenant, 0) + running.sent
        room = sum(sent.values()) < MAX_OPEN

        def is_ready(running: R) -> bool:
            if not running.window:
                return False
            model, tenant = running.model, running.job.tenant
            if model is None:
                return True
            if running.sent >= MAX_OPEN_OF_JOB or paused.get(tenant, 0) > now_ms:
                return False
            if not room and sent[tenant] >= RESERVED_OF_TENANT:
                return False
            return tenant in tenants and not full(model)

        ready = [running for running in jobs if is_ready(running)]
        if not ready:
            return None
        first: dict[str, R] = {}
        for running in ready:
            known = first.setdefault(running.job.tenant, running)
            if running.job.expires_at < known.job.expires_at:
                first[running.job.tenant] = running
        # Who had nothing to send for a while has no claim to what it did not use.
        floor = min((self._used[t] for t in first if t in self._used), default=0.0)
        for tenant in first:
            self._used[tenant] = max(floor, self._used.get(tenant, floor))
        return first[min(first, key=lambda tenant: self._used[tenant])]

    def take(self, running: RunningJob, weight: float) -> BatchItem | BadLine:
        """The next line of `running`, which is counted for its tenant."""
        line = running.window.pop()
        if isinstance(line, BatchItem):
            tenant = running.job.tenant
            self._used[tenant] = self._used.get(tenant, 0.0) + line.num_tokens / max(weight, 1e-3)
        return line


def in_prefix_order(lines: list[BatchItem | BadLine]) -> list[BatchItem | BadLine]:
    """The last one first: those that begin alike follow one another, so a worker finds their prefix in its
    cache."""
    bad = [line for line in lines if isinstance(line, BadLine)]
    items = [line for line in lines if isinstance(line, BatchItem)]
    items.sort(key=lambda item: (item.model.spec.id, item.prompt_token_ids), reverse=True)
    return [*items, *bad]


def in_file_order(lines: list[BatchItem | BadLine]) -> list[BatchItem | BadLine]:
    """The last one first."""
    return lines[::-1]


def queued_tokens(fleet: FleetView, partition: int) -> dict[str, int]:
    """By model, what waits in admission of the batch class in one partition of inference.requests."""
    found: dict[str, int] = {}
    newest = -1
    for member in fleet.live("admission"):
        for status in [] if member.heartbeat is None else member.heartbeat.partitions:
            if status.partition == partition and status.takeover_offset > newest:
                newest = status.takeover_offset
                found = {q.model: q.tokens for q in status.queued if q.priority == PriorityClass.BATCH}
    return found


def next_to_run(waiting: Iterable[FileJob], running: Iterable[FileJob]) -> FileJob | None:
    """Whose turn comes when there is room for one more: of the tenant with the fewest running."""
    count: dict[str, int] = {}
    for job in running:
        count[job.tenant] = count.get(job.tenant, 0) + 1
    return min(
        waiting,
        key=lambda job: (count.get(job.tenant, 0), job.expires_at, job.batch_id),
        default=None,
    )
