"""All that waits for one model: a fair queue a class, and the order of arrival."""

from collections import Counter

from schemas.priority import PriorityClass
from streams.admission.fair_queue import FairQueue, QueuedRequest


class ModelQueue:
    """`waiting` holds what waits by request_id, oldest first. `no_worker_since` is None while one serves."""

    def __init__(self) -> None:
        self.classes = tuple(FairQueue() for _ in PriorityClass)
        self.waiting: dict[bytes, QueuedRequest] = {}
        self.no_worker_since: int | None = None
        self._tokens: Counter[int] = Counter()

    def append(self, item: QueuedRequest, weight: float) -> None:
        self.classes[item.request.priority].append(item, weight)
        self.waiting[item.request.request_id] = item
        self._tokens[item.partition] += item.tokens

    def take(self, item: QueuedRequest) -> None:
        """Takes out the first of its class."""
        self.classes[item.request.priority].take(item)
        self._forget(item)

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
