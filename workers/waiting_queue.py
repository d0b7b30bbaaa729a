"""Requests that hold no device blocks: by class, then by arrival, with preempted ones in front."""

from collections import deque
from collections.abc import Iterable, Set
from itertools import islice

from schemas.priority import PriorityClass
from workers.request import Request, RequestStatus


class WaitingQueue:
    """One queue a class."""

    def __init__(self) -> None:
        self._by_class: dict[PriorityClass, deque[Request]] = {c: deque() for c in PriorityClass}

    def __len__(self) -> int:
        return sum(map(len, self._by_class.values()))

    def len_by_class(self) -> tuple[int, ...]:
        """Queue lengths, indexed by class."""
        return tuple(map(len, self._by_class.values()))

    def num_uncomputed_tokens(self, priority: PriorityClass) -> int:
        """Tokens that all of a class must compute before they sample."""
        return sum(r.num_tokens - r.num_computed_tokens for r in self._by_class[priority])

    def of_class(self, priority: PriorityClass) -> Iterable[Request]:
        """All of a class, in their order."""
        return self._by_class[priority]

    def append(self, request: Request) -> None:
        self._by_class[request.priority].append(request)

    def put_back(self, request: Request) -> None:
        """To the head of its class, behind older ones that were preempted too."""
        queue = self._by_class[request.priority]
        index = 0
        for other in queue:
            if other.status is not RequestStatus.PREEMPTED or other.arrival > request.arrival:
                break
            index += 1
        queue.insert(index, request)

    def remove(self, request: Request) -> None:
        """Raises ValueError if the request does not wait here."""
        self._by_class[request.priority].remove(request)

    def first(
        self, priority: PriorityClass, blocked_partitions: Set[int], num_passed: int = 0
    ) -> Request | None:
        """The next of this class whose reply partition takes output, behind `num_passed` such; or None."""
        queue = self._by_class[priority]
        if not blocked_partitions:
            return queue[num_passed] if len(queue) > num_passed else None
        open_ones = (r for r in queue if r.reply_partition not in blocked_partitions)
        return next(islice(open_ones, num_passed, None), None)
