"""What the reply partition says of requests that are not read from their topics in this life. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.records import Claim
from schemas.sampling import TokenLogprobs
from schemas.stream_state import ReplyRecord, Run, StreamState
from schemas.token_records import TokenChunk
from streams.ledger.batch_outcome import reopen
from streams.ledger.open_request import OpenRequest, fold_chunk

RECOVERED_MS = 600_000


@dataclass(frozen=True, slots=True)
class Recovered:
    """`since` is where the reply partition must be read from, `logprobs` those of the state's tokens."""

    state: StreamState
    since: int
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class Recovery:
    """Until its request is read, and `RECOVERED_MS` at most, each state is kept and followed: also one that
    begins in this life. What an earlier life had sent may be admitted, run and end before this one reads it.
    """

    def __init__(self, now_ms: int) -> None:
        self._born_ms, self._is_over = now_ms, False
        self._states: dict[bytes, Recovered] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._states

    def has_any(self, request_ids: Iterable[bytes]) -> bool:
        """Whether one of them is known of: an earlier life began the line whose choices they are."""
        return bool(self._states) and any(request_id in self._states for request_id in request_ids)

    @property
    def low(self) -> int | None:
        """Where a successor would have to read from to learn the same."""
        return min((known.since for known in self._states.values()), default=None)

    def owner_epochs(self) -> set[int]:
        """The lives that left something open."""
        states = [recovered.state for recovered in self._states.values()]
        return {s.owner_epoch for s in states if s.owner_epoch is not None and not s.ended}

    def take(self, request_id: bytes) -> Recovered | None:
        """The request was read; what is known of it is the caller's from now on."""
        return self._states.pop(request_id, None)

    def recall(self, request: OpenRequest, clock_ms: int) -> bool:
        """The request is open from now on: it stands where the log says. False where that says nothing."""
        known = self.take(request.item.request_id)
        if known is None:
            return False
        request.state, request.logprobs, request.sign_ms = known.state, known.logprobs, clock_ms
        request.ran = known.state.run is not None or bool(known.state.lost)
        request.line.since = min(request.line.since, known.since)
        return True

    def apply(self, record: ReplyRecord, offset: int, timestamp_ms: int) -> None:
        """Takes a record of a request that is not open and has not ended in this life, or a claim to all."""
        if isinstance(record, Claim) and record.request_id is None:
            for recovered in self._states.values():
                recovered.state.apply(record, timestamp_ms)
            return
        assert record.request_id is not None
        if (known := self._known(record.request_id, offset)) is not None:
            known.state.apply(record, timestamp_ms)
            reopen(known.state)

    def apply_chunk(self, run: Run, chunk: TokenChunk, offset: int, timestamp_ms: int) -> None:
        """Takes tokens of such a request."""
        if (known := self._known(chunk.request_id, offset)) is not None:
            fold_chunk(known.state, known.logprobs, run, chunk, timestamp_ms)

    def expire(self, now_ms: int) -> None:
        if now_ms - self._born_ms > RECOVERED_MS:
            self._is_over = True
            self._states.clear()

    def _known(self, request_id: bytes, offset: int) -> Recovered | None:
        known = self._states.get(request_id)
        if known is None:
            if self._is_over:
                return None
            known = self._states[request_id] = Recovered(StreamState(request_id), offset)
        return known
