"""Records of inference.requests that are read and not yet decided about: the higher class first.

A decision takes most of a millisecond, and hundreds of batch requests come at once: in the order of arrival
an interactive request waited for all of them (at p99 350 ms to first token beside a batch, 53 ms alone).
"""

import asyncio
from collections import deque
from typing import Any

from schemas.priority import PriorityClass
from schemas.topics import priority_of

# Records that may wait here; more stay with the consumer. What owners may have open at once is less.
CAPACITY = 16_384
# Of so many records one is of the lowest class that waits: it goes slowly, and does not stand.
FLOOR = 16
# So many of the highest class are taken together, or of another, for which one that comes meanwhile waits.
# Taken one by one each goes to the broker and back alone, which costs as much as to decide about it.
MOST, MOST_BELOW = 16, 4
# Once in so many records those that the consumer holds are gathered, this many at most: else it hands one
# over for each that is taken, and its order is the order again. It takes a few turns of the loop for each.
_GATHER_EVERY = 8
_GATHER_MOST = 256
_TURNS_A_RECORD = 5


class Inbox:
    """`put` keeps the order of each partition, all of whose records are of one class."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._by_class: tuple[deque[Any], ...] = tuple(deque() for _ in PriorityClass)
        self._count = 0
        self._ungathered = self._since_lowest = 0
        self._came = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, message: Any) -> None:
        """`message` has a `partition`. Waits while the inbox is full."""
        while self._count >= self._capacity:
            self._room.clear()
            await self._room.wait()
        self._by_class[priority_of(message.partition)].append(message)
        self._count += 1
        self._came.set()

    async def take(self) -> list[Any]:
        """The next ones, of one class. Always lets others run before, who may put what comes first."""
        await (self._gather() if self._ungathered >= _GATHER_EVERY else asyncio.sleep(0))
        while not self._count:
            self._came.clear()
            await self._came.wait()
        some = [waiting for waiting in self._by_class if waiting]
        is_due = self._since_lowest == FLOOR - 1
        waiting = some[-1 if is_due else 0]
        most = MOST if waiting is self._by_class[0] else MOST_BELOW
        if len(some) > 1:
            most = 1 if is_due else min(most, FLOOR - 1 - self._since_lowest)
        taken = [waiting.popleft() for _ in range(min(len(waiting), most))]
        self._count -= len(taken)
        self._ungathered += len(taken)
        self._since_lowest = 0 if is_due or len(some) == 1 else self._since_lowest + len(taken)
        self._room.set()
        return taken

    async def _gather(self) -> None:
        self._ungathered = 0
        turns, before = 0, self._count
        while turns < _TURNS_A_RECORD and self._count < min(before + _GATHER_MOST, self._capacity):
            count = self._count
            await asyncio.sleep(0)
            turns = turns + 1 if self._count == count else 0
