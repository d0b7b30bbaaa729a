"""Requests that have ended, remembered a while: late records of them must not look like new ones. Pure."""

from collections import deque

from gateway.owned_request import OwnedRequest
from schemas.records import Completion
from schemas.stream_state import LATE_ADMITTED_MS, Run

_KEPT_MS = 60_000
# By then the bill of an ended request is acked, and admission says nothing more of it.
SETTLED_MS = LATE_ADMITTED_MS + 5_000


class EndedRequests:
    """By request_id; `clock` is the log's (ms)."""

    def __init__(self) -> None:
        self._ended: dict[bytes, OwnedRequest] = {}
        self._order: deque[tuple[int, bytes]] = deque()

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._ended

    def get(self, request_id: bytes) -> OwnedRequest | None:
        return self._ended.get(request_id)

    def put(self, owned: OwnedRequest, clock: int) -> None:
        request_id = owned.request.request_id
        owned.drop_tokens()
        self._ended[request_id] = owned
        self._order.append((clock, request_id))

    def expire(self, clock: int) -> None:
        while self._order and clock - self._order[0][0] >= _KEPT_MS:
            self._ended.pop(self._order.popleft()[1], None)

    def unbilled_offsets(self, partition: int, clock: int) -> list[int]:
        """Where those begin, in a reply partition, that ended a moment ago."""
        offsets: list[int] = []
        for ended, request_id in reversed(self._order):
            if clock - ended >= SETTLED_MS:
                break
            owned = self._ended.get(request_id)
            if owned is not None and owned.request.reply_partition == partition:
                offsets.append(owned.first_offset)
        return offsets

    def stray(self, request_id: bytes, run: Run, attempt: int) -> OwnedRequest | None:
        """The request that this run still tells tokens of, unless it is the one that has ended it."""
        owned = self._ended.get(request_id)
        if owned is None:
            return None
        end = owned.state.end
        if isinstance(end, Completion) and run == owned.state.run and attempt == owned.state.attempt:
            return None
        return owned
