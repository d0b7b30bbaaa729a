"""All that waits for one model: a fair queue a class, and the order of arrival."""

from collections import Counter

from schemas.priority import PriorityClass
from streams.admission.fair_queue import FairQueue, QueuedRequest

# Of what is dispatched while the next lower class waits, so much is owed to that class: it goes slowly, and
# does not stand. A twentieth costs the higher class less than its own ups and downs.
FLOOR = 0.05


class ModelQueue:
    """`waiting` holds what waits by request_id, oldest first. `no_worker_since` is None while one serves."""

    def __init__(self) -> None:
        self.classes = tuple(FairQueue() for _ in PriorityClass)
        self.waiting: dict[bytes, QueuedRequest] = {}
        self.no_worker_since: int | None = None
        self._tokens: Counter[int] = Counter()
        self._owed = [0.0 for _ in PriorityClass]

    def append(self, item: QueuedRequest, weight: float) -> None:
        self.classes[item.request.priority].append(item, weight)
        self.waiting[item.request.request_id] = item
        self._tokens[item.partition] += item.tokens

    def take(self, item: QueuedRequest) -> None:
        """Takes out the first of its class to be dispatched; so it owes the next class its floor."""
        priority = item.request.priority
        self.classes[priority].take(item)
        self._forget(item)
        self._owed[priority] = max(0.0, self._owed[priority] - item.tokens)
        lower = priority + 1
        if lower < len(self.classes):
            first = self.classes[lower].first()
            if first is None:
                self._owed[lower] = 0.0
            elif self._owed[lower] < first.tokens:  # else it had its turn and found no room
                self._owed[lower] += FLOOR * item.tokens

    def owed(self, priority: int) -> QueuedRequest | None:
        """What waits in the class below `priority` and is owed its turn before that one's next."""
        lower = priority + 1
        if lower == len(self.classes) or not self._owed[lower]:
            return None
        first = self.classes[lower].first()
        return None if first is None or self._owed[lower] < first.tokens else first

    def cancel(self, item: QueuedRequest) -> None:
        """Takes out any that waits."""
        self.classes[item.request.priority].cancel(item)
        self._forget(item)

    def tokens_of(self, partition: int) -> int:
        """Tokens that wait from a partition of inference.requests."""
        return self._tokens[partition]

    def overdue(self, now: int, wait_ms: int) -> list[QueuedRequest]:
        """What has waited for `wait_ms` with no worker to serve it."""
        since = self.no_worker_since
        if since is None:
            return []
        found = []
        for item in self.waiting.values():
            if max(item.queued_at, since) + wait_ms > now:
                break  # those behind came later
            found.append(item)
        return found

    def _forget(self, item: QueuedRequest) -> None:
        del self.waiting[item.request.request_id]
        self._tokens[item.partition] -= item.tokens
