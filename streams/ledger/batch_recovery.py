"""What the reply partition says of requests that are not read from their topics in this life. Pure."""

from dataclasses import dataclass

from schemas.records import Claim, TokenChunk
from schemas.stream_state import ReplyRecord, Run, StreamState
from streams.ledger.batch_outcome import reopen

RECOVERED_MS = 600_000


@dataclass(frozen=True, slots=True)
class Recovered:
    """`since` is where the reply partition must be read from."""

    state: StreamState
    since: int


class Recovery:
    """Until its request is read, and `RECOVERED_MS` at most, a state that was begun is kept and followed."""

    def __init__(self, log_end: int, now_ms: int) -> None:
        """`log_end`: the reply partition's end when this life began; only below it a state may begin."""
        self._log_end, self._born_ms = log_end, now_ms
        self._states: dict[bytes, Recovered] = {}

    def __len__(self) -> int:
        return len(self._states)

    def owner_epochs(self) -> set[int]:
        """The lives that left something open."""
        states = [recovered.state for recovered in self._states.values()]
        return {s.owner_epoch for s in states if s.owner_epoch is not None and not s.ended}

    def take(self, request_id: bytes) -> Recovered | None:
        """The request was read; what is known of it is the caller's from now on."""
        return self._states.pop(request_id, None)

    def apply(self, record: ReplyRecord, offset: int, timestamp_ms: int) -> None:
        """Takes a record of a request that is not open, or a claim to all."""
        if isinstance(record, Claim) and record.request_id is None:
            for recovered in self._states.values():
                recovered.state.apply(record, timestamp_ms)
            return
        assert record.request_id is not None
        if (state := self._state(record.request_id, offset)) is not None:
            state.apply(record, timestamp_ms)
            reopen(state)

    def apply_chunk(self, run: Run, chunk: TokenChunk, offset: int, timestamp_ms: int) -> None:
        """Takes tokens of a request that is not open."""
        if (state := self._state(chunk.request_id, offset)) is not None:
            state.apply_chunk(run, chunk, timestamp_ms)

    def expire(self, now_ms: int) -> None:
        if now_ms - self._born_ms > RECOVERED_MS:
            self._states.clear()

    def _state(self, request_id: bytes, offset: int) -> StreamState | None:
        known = self._states.get(request_id)
        if known is None:
            if offset >= self._log_end:
                return None
            known = self._states[request_id] = Recovered(StreamState(request_id), offset)
        return known.state
