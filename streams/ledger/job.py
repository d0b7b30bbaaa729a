"""A batch of a file's lines: its statuses, and which of its lines have ended. Pure.

validating → in_progress → finalizing → completed, failed or expired
                         → cancelling → cancelled

A state counts what is in the parts, and is told only when they are written. Of the lines themselves nothing
is kept but a bit each, and where those that are read and have not ended begin.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from schemas.api.batches import CANCELLED_CODE, EXPIRED_CODE
from schemas.records import BatchError, BatchJob, BatchState
from schemas.stored_files import Kind
from streams.ledger.batch_actions import FileAnswer
from streams.ledger.job_parts import JobParts, PartWrite


class Status(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


_NEXT: Mapping[Status, frozenset[Status]] = {
    Status.VALIDATING: frozenset({Status.IN_PROGRESS, Status.FAILED, Status.EXPIRED, Status.CANCELLED}),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.CANCELLING}),
    Status.FINALIZING: frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED}),
    Status.CANCELLING: frozenset({Status.CANCELLED}),
    Status.COMPLETED: frozenset(),
    Status.FAILED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.CANCELLED: frozenset(),
}


class FileJob:
    """`next_index`, `next_offset`: the line that is to be read next, and where in the file it begins."""

    def __init__(self, asked: BatchJob, state: BatchState | None, epoch: int) -> None:
        """`state`: the last one that was committed. `epoch`: see JobParts."""
        self.asked = asked
        expires_at = asked.created_at + asked.completion_window_ms
        self._state = state or BatchState(asked.batch_id, asked.tenant, Status.VALIDATING, expires_at)
        self._parts: dict[Kind, JobParts] = {
            "output": JobParts(self._state.output, epoch),
            "error": JobParts(self._state.error_output, epoch),
        }
        self.next_index, self.next_offset = self._state.low_index, self._state.low_offset
        self._ended = _bits(self._state)
        self._open: dict[int, int] = {}

    @property
    def batch_id(self) -> str:
        return self.asked.batch_id

    @property
    def tenant(self) -> str:
        return self.asked.tenant

    @property
    def status(self) -> Status:
        return Status(self._state.status)

    @property
    def expires_at(self) -> int:
        return self._state.expires_at

    @property
    def total(self) -> int:
        return self._state.total

    @property
    def read_out(self) -> bool:
        return self.next_index >= self._state.total

    @property
    def open(self) -> int:
        """Lines that were read and have not ended."""
        return len(self._open)

    @property
    def buffered(self) -> int:
        """Bytes of results in memory."""
        return sum(parts.buffered for parts in self._parts.values())

    @property
    def errors(self) -> Sequence[BatchError]:
        return self._state.errors

    def lines(self, kind: Kind) -> int:
        """How many lines the output or error file has."""
        state = self._state
        return state.completed if kind == "output" else state.failed + state.expired + state.cancelled

    def transition_to(self, status: Status, now_ms: int) -> None:
        """Raises RuntimeError for a step that is none."""
        if status not in _NEXT[self.status]:
            raise RuntimeError(f"{self.batch_id}: {self.status} to {status}")
        self._state.status = status
        match status:
            case Status.IN_PROGRESS:
                self._state.in_progress_at = now_ms
            case Status.FINALIZING:
                self._state.finalizing_at = now_ms
            case Status.CANCELLING:
                self._state.cancelling_at = now_ms
            case _:
                self._state.ended_at = now_ms

    def validated(self, total: int, now_ms: int) -> None:
        """`total`: lines of the file."""
        self._state.total = total
        self._ended = bytearray((total + 7) // 8)
        self.transition_to(Status.IN_PROGRESS, now_ms)

    def fail(self, errors: Sequence[BatchError], now_ms: int) -> None:
        """It does not go on. What is delivered stays; while it runs, the caller finalizes it."""
        self._state.errors = list(errors)
        if self.status is Status.VALIDATING:
            self.transition_to(Status.FAILED, now_ms)

    def finish(self, now_ms: int) -> None:
        """The last status, once the files are there."""
        state = self._state
        if self.status is Status.CANCELLING:
            self.transition_to(Status.CANCELLED, now_ms)
        elif state.errors:
            self.transition_to(Status.FAILED, now_ms)
        else:
            self.transition_to(Status.EXPIRED if state.expired else Status.COMPLETED, now_ms)

    def take(self, offset: int, end: int) -> int | None:
        """Notes that the next line was read, from `offset` to `end` in the file. Its index, or None where it
        has ended in an earlier life."""
        index = self.next_index
        self.next_index, self.next_offset = index + 1, end
        if self._ended[index >> 3] >> (index & 7) & 1:
            return None
        self._open[index] = offset
        return index

    def forget(self, indexes: Iterable[int]) -> None:
        """Lines that were taken and can never end: the input is not what it was."""
        for index in indexes:
            self._open.pop(index, None)

    def add(self, answers: Iterable[FileAnswer]) -> list[tuple[Kind, PartWrite]]:
        """Lines that ended, each once. What is to be written before `state` may be told."""
        lines: dict[Kind, list[bytes]] = {"output": [], "error": []}
        for answer in answers:
            index = answer.source.index
            # Raises KeyError for one that ended before: it must not be there twice.
            del self._open[index]
            self._ended[index >> 3] |= 1 << (index & 7)
            lines["output" if answer.code is None else "error"].append(answer.line)
            self._count(answer)
        return [(kind, write) for kind, parts in self._parts.items() for write in parts.append(lines[kind])]

    def _count(self, answer: FileAnswer) -> None:
        state = self._state
        match answer.code:
            case None:
                state.completed += 1
            case code if code == EXPIRED_CODE:
                state.expired += 1
            case code if code == CANCELLED_CODE:
                state.cancelled += 1
            case _:
                state.failed += 1
        state.input_tokens += answer.input_tokens
        state.cached_tokens += answer.cached_tokens
        state.output_tokens += answer.output_tokens

    def close_parts(self) -> None:
        """Frees the memory of results; what `add` gave last must be written."""
        for parts in self._parts.values():
            parts.close()

    def state(self) -> BatchState:
        """As it is now: what a successor needs."""
        # Lines are read in order, so the first that is open is the lowest.
        low = next(iter(self._open), self.next_index)
        offset = self._open.get(low, self.next_offset)
        state = self._state
        state.output, state.error_output = self._parts["output"].parts(), self._parts["error"].parts()
        state.low_index, state.low_offset = low, offset
        bits = int.from_bytes(self._ended[low >> 3 :], "little") >> (low & 7)
        state.ended = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        return replace(state, errors=list(state.errors))


def _bits(state: BatchState) -> bytearray:
    """One of each line, from the first on; below `low_index` nobody asks."""
    size = (state.total + 7) // 8
    bits = int.from_bytes(state.ended, "little") << state.low_index
    return bytearray(bits.to_bytes(size, "little"))
