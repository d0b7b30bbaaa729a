"""Folds of streams that no client reads just now, for the next one that asks. Pure."""

from collections import OrderedDict
from typing import NamedTuple

from gateway.replay import StreamFold

# What an open one may grow by while it is followed; so the number of these is bounded too.
_OPEN_BYTES = 256 << 10


class Place(NamedTuple):
    """One stream: where its first record may lie, and whose it is."""

    tenant: str
    request_id: bytes
    partition: int
    first_offset: int


class KeptFolds:
    """Holds about `most_bytes`, each for `most_s` since it was put; the first to go is the one put first.

    Who is dropped has `kept` set back, for who feeds it.
    """

    def __init__(self, most_bytes: int, most_s: float) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._most_s = most_s
        self._entries: OrderedDict[Place, tuple[StreamFold, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, place: Place, fold: StreamFold, now: float) -> None:
        """`now`: monotonic s."""
        self.take(place)
        num_bytes = fold.num_bytes + (0 if fold.over else _OPEN_BYTES)
        self._entries[place] = fold, num_bytes, now
        self.num_bytes += num_bytes
        fold.kept = True
        self.expire(now)

    def get(self, place: Place) -> StreamFold | None:
        entry = self._entries.get(place)
        return None if entry is None else entry[0]

    def take(self, place: Place) -> StreamFold | None:
        """It is not kept any more."""
        entry = self._entries.pop(place, None)
        if entry is None:
            return None
        fold, num_bytes, _ = entry
        self.num_bytes -= num_bytes
        fold.kept = False
        return fold

    def expire(self, now: float) -> None:
        """Drops what is too old, or too much."""
        while self._entries:
            place, (fold, _, put_at) = next(iter(self._entries.items()))
            if self.num_bytes <= self._most_bytes and now - put_at < self._most_s and not fold.lost:
                return
            self.take(place)
