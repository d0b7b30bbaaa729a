"""The batches there are, as batch.jobs and batch.states tell them. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from schemas.api.batches import ENDED
from schemas.records import BatchCancel, BatchJob, BatchState
from schemas.stored_files import KEPT_MS, Kind, StoredFile, object_parts, result_file_id
from schemas.topics import BATCHES_RETENTION_MS

_KINDS: tuple[Kind, ...] = ("output", "error")


@dataclass(slots=True)
class Batch:
    """`state` is None until its coordinator has begun; of it only what clients are told."""

    job: BatchJob
    state: BatchState | None = None
    cancel_asked_at: int | None = None

    @property
    def ended(self) -> bool:
        return self.state is not None and self.state.status in ENDED


class BatchBook:
    """Fed with the records of both topics; those of one batch may come in any order between them."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, dict[str, Batch]] = {}
        self._early: dict[str, BatchState] = {}
        self._reading: dict[tuple[str, str], set[str]] = {}
        self._results: dict[tuple[str, str], tuple[str, Kind]] = {}

    def on_job(self, record: BatchJob | BatchCancel) -> None:
        if isinstance(record, BatchCancel):
            batch = self.get(record.tenant, record.batch_id)
            if batch is not None and batch.cancel_asked_at is None:
                batch.cancel_asked_at = record.asked_at
            return
        batches = self._by_tenant.setdefault(record.tenant, {})
        if record.batch_id in batches:
            return
        batch = batches[record.batch_id] = Batch(record, self._early.pop(record.batch_id, None))
        for kind in _KINDS:
            self._results[record.tenant, result_file_id(record.batch_id, kind)] = record.batch_id, kind
        if not batch.ended:
            self._reading.setdefault((record.tenant, record.input_file_id), set()).add(record.batch_id)

    def on_state(self, state: BatchState) -> None:
        known = replace(state, ended=b"")
        batch = self.get(state.tenant, state.batch_id)
        if batch is None:
            self._early[state.batch_id] = known
            return
        batch.state = known
        if batch.ended:
            self._read_no_more(batch.job)

    def on_deleted(self, batch_id: str) -> None:
        for batches in self._by_tenant.values():
            batch = batches.pop(batch_id, None)
            if batch is not None:
                self._forget(batch.job)
                return

    def forget(self, now_ms: int) -> None:
        """Lets go of what the topics hold no longer."""
        oldest = now_ms - BATCHES_RETENTION_MS
        for batches in self._by_tenant.values():
            for batch in [b for b in batches.values() if b.job.created_at < oldest]:
                del batches[batch.job.batch_id]
                self._forget(batch.job)
        self._early = {i: s for i, s in self._early.items() if s.expires_at > oldest}

    def get(self, tenant: str, batch_id: str) -> Batch | None:
        return self._by_tenant.get(tenant, {}).get(batch_id)

    def newest_first(self, tenant: str) -> Iterator[Batch]:
        batches = self._by_tenant.get(tenant, {})
        return (batches[batch_id] for batch_id in sorted(batches, reverse=True))

    def user_of(self, tenant: str, file_id: str) -> str | None:
        """A batch that has not ended and reads the file, or writes it."""
        if (readers := self._reading.get((tenant, file_id))) is not None:
            return min(readers)
        written = self._results.get((tenant, file_id))
        batch = None if written is None else self.get(tenant, written[0])
        return None if batch is None or batch.ended else batch.job.batch_id

    def result_file(self, tenant: str, file_id: str) -> StoredFile | None:
        """The output or error file of a batch that has not ended, as far as it is written. Those of one that
        has are noted in the object store, until they are deleted there."""
        found = self._results.get((tenant, file_id))
        batch = None if found is None else self.get(tenant, found[0])
        if found is None or batch is None or batch.state is None or batch.ended:
            return None
        batch_id, kind = found
        parts = batch.state.output if kind == "output" else batch.state.error_output
        if not parts:
            return None
        kept_ms = batch.job.output_expires_ms or KEPT_MS
        return StoredFile(
            id=file_id,
            tenant=tenant,
            filename=f"{batch_id}_{kind}.jsonl",
            purpose="batch_output",
            bytes=sum(part.size for part in parts),
            created_at=batch.state.in_progress_at or batch.job.created_at,
            expires_at=batch.state.expires_at + kept_ms,
            parts=object_parts(tenant, batch_id, kind, parts),
        )

    def _read_no_more(self, job: BatchJob) -> None:
        key = job.tenant, job.input_file_id
        if (readers := self._reading.get(key)) is not None:
            readers.discard(job.batch_id)
            if not readers:
                del self._reading[key]

    def _forget(self, job: BatchJob) -> None:
        self._read_no_more(job)
        for kind in _KINDS:
            self._results.pop((job.tenant, result_file_id(job.batch_id, kind)), None)
