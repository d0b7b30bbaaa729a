"""Which request runs for each Idempotency-Key. Pure.

The first request with a key runs; a later one is told where to read its answer. A KeyedRequest is acked
before the Dispatch of the first one, so who takes the partition over finds every key for which anything ran.
What waited there is sent again by its owner, and is then the first if no other was meanwhile. A key that is
free again after its request was let in is written too, behind that.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from schemas import topics
from schemas.records import Duplicate, InferenceRequest, KeyedRequest
from streams.admission.refusal import Refusal

KEEP_MS = topics.TOKENS_RETENTION_MS
_MOST = 200_000  # about 80 MB


class IdempotencyKeys:
    """Of the partitions held, for as long as an answer can be read; beyond `most` the oldest go."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._known: dict[bytes, tuple[int, KeyedRequest]] = {}
        self._order: deque[tuple[int, bytes]] = deque()  # (accepted_at, key), nearly ascending
        self._loaded: set[int] = set()

    def __len__(self) -> int:
        return len(self._known)

    def is_loaded(self, partition: int) -> bool:
        """All that earlier holders of the partition knew is known."""
        return partition in self._loaded

    def load(self, partition: int, records: Iterable[KeyedRequest]) -> None:
        """What earlier holders wrote, in order."""
        for record in records:
            if record.freed:
                self.free(record.key, record.request_id)
            else:
                self._put(partition, record)

    def loaded(self, partition: int) -> None:
        self._loaded.add(partition)

    def drop(self, partitions: Iterable[int]) -> None:
        """They are another's now."""
        gone = set(partitions)
        self._loaded -= gone
        self._known = {key: entry for key, entry in self._known.items() if entry[0] not in gone}
        self._order = deque(entry for entry in self._order if entry[1] in self._known)

    def check(self, request: InferenceRequest, partition: int) -> Duplicate | Refusal | None:
        """None: the request is the one that runs for its key, or has none."""
        asked = request.idempotency
        if asked is None or request.attempt > 1:
            return None
        entry = self._known.get(asked.key)
        if entry is None:
            self._put(partition, keyed(request))
            return None
        first = entry[1]
        if first.request_id == request.request_id:
            return None
        if first.body != asked.body:
            message = "Idempotency-Key: this key was used for another request"
            return Refusal(422, "idempotency_key_reused", message)
        return Duplicate(request.request_id, first.public_id, first.accepted_at)

    def refused(self, request: InferenceRequest) -> None:
        """Nothing ran: the key is free for another try."""
        asked = request.idempotency
        if asked is not None and request.attempt == 1:
            self.free(asked.key, request.request_id)

    def free(self, key: bytes, request_id: bytes) -> KeyedRequest | None:
        """The key is no longer that request's. Returns what later holders must know if the request was noted;
        None if the key is not that request's."""
        entry = self._known.get(key)
        if entry is None or entry[1].request_id != request_id:
            return None
        del self._known[key]
        return replace(entry[1], freed=True)

    def expire(self, now: int) -> None:
        while self._order and (self._order[0][0] <= now - KEEP_MS or len(self._order) > self._most):
            accepted_at, key = self._order.popleft()
            entry = self._known.get(key)
            if entry is not None and entry[1].accepted_at == accepted_at:
                del self._known[key]

    def _put(self, partition: int, record: KeyedRequest) -> None:
        self._known[record.key] = (partition, record)
        self._order.append((record.accepted_at, record.key))


def keyed(request: InferenceRequest) -> KeyedRequest:
    """What is kept of a request with a key."""
    asked = request.idempotency
    assert asked is not None
    return KeyedRequest(request.request_id, asked.key, asked.body, asked.public_id, request.accepted_at)
