"""Lines of a job's input, in order: cut from ranges of the file, made into requests some hundred at a
time."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from schemas.api.choices import MAX_CHOICES, choice_request_id
from schemas.api.errors import ApiError
from schemas.models import LoadedModel
from schemas.records import BatchError, BatchJob, Tenant
from schemas.stored_files import StoredFile
from streams.ledger.batch_item import BatchItem
from streams.ledger.file_lines import item_request_id
from streams.ledger.job import FileJob
from streams.ledger.job_feeding import in_file_order, in_prefix_order
from streams.ledger.job_lines import BadLine, Line, LineCheck, LineCutter, read_line, source_of
from streams.ledger.job_store import InputGoneError, JobStore

RANGE_BYTES = 1 << 20
# So many are read ahead and put in order of their prefixes.
WINDOW_LINES = 1_024
Lines = list[BatchItem | BadLine]


async def check_lines(store: JobStore, job: BatchJob) -> tuple[int, list[BatchError]]:
    """How many lines the input has, and what is wrong with it as a whole."""
    try:
        file = await store.find(job.tenant, job.input_file_id)
        cutter, check, offset = LineCutter(), LineCheck(job), 0
        while data := await store.read(file, offset, RANGE_BYTES):
            offset += len(data)
            if not await asyncio.to_thread(_check, check, cutter, data):
                return check.total, check.errors
        if check.take(cutter.end()):
            check.end()
    except InputGoneError:
        message = f"the input file {job.input_file_id} is not there"
        return 0, [BatchError("input_file_not_found", message, param="input_file_id")]
    return check.total, check.errors


def _check(check: LineCheck, cutter: LineCutter, data: bytes) -> bool:
    return check.take(cutter.push(data))


class JobInput:
    """`error` is why no more can be read, None while it can."""

    def __init__(
        self, store: JobStore, job: FileJob, models: Mapping[str, LoadedModel], prefix_order: bool
    ) -> None:
        self._order = in_prefix_order if prefix_order else in_file_order
        self.error: BatchError | None = None
        self._store, self._job, self._models = store, job, models
        self._file: StoredFile | None = None
        self._cutter = LineCutter(job.next_offset)
        self._read_to = job.next_offset
        self._lines: list[Line] = []

    async def next(
        self, rules: Tenant | None, stopped: ApiError | None, known: Callable[[Iterable[bytes]], bool]
    ) -> Lines:
        """The next lines that have not ended, the last one first; none at the end, or with `error`.

        `stopped`: how they end without being sent, but those that an earlier life left word of (`known`: of
        any of these requests).
        """
        job = self._job
        found: list[tuple[int, Line]] = []
        try:
            while not found and not job.read_out:
                if not self._lines:
                    await self._read_on()
                taken, self._lines = self._lines[:WINDOW_LINES], self._lines[WINDOW_LINES:]
                for line in taken:
                    if job.read_out:
                        raise ApiError(400, "input_file_changed", "more lines than were checked")
                    index = job.take(line.offset, line.end)
                    if index is not None:
                        found.append((index, line))

            def make() -> Lines:
                lines: Lines = []
                for index, line in found:
                    rid = item_request_id(job.batch_id, index)
                    if stopped is None or known(choice_request_id(rid, i) for i in range(MAX_CHOICES)):
                        lines.append(read_line(job.asked, index, line, self._models, rules))
                    else:
                        lines.append(BadLine(source_of(job.asked, index, line), rid, stopped))
                return self._order(lines)

            return await asyncio.to_thread(make) if found else []
        except InputGoneError:
            message = f"the input file {job.asked.input_file_id} was deleted while the batch ran"
            self.error = BatchError("input_file_not_found", message, param="input_file_id")
        except ApiError as e:
            message = f"the input file is not as it was checked: {e.message}"
            self.error = BatchError("input_file_changed", message, param="input_file_id")
        job.forget(index for index, _ in found)
        return []

    async def _read_on(self) -> None:
        if self._file is None:
            self._file = await self._store.find(self._job.tenant, self._job.asked.input_file_id)
        while not self._lines:
            data = await self._store.read(self._file, self._read_to, RANGE_BYTES)
            self._read_to += len(data)
            self._lines = self._cutter.push(data) if data else self._cutter.end()
            if not data and not self._lines:
                raise ApiError(400, "input_file_changed", "fewer lines than were checked")
