"""Which records of a tenant's request topic are read, open and answered. Pure.

What must survive a restart is one Kafka commit: the lowest offset not answered, and in its metadata a
bitmap of those above it that are. Committed in one transaction with the answers, it lets results go out
in any order, and a restart neither repeats nor forgets one.
"""

import base64
import binascii

# Kafka keeps 4,096 characters of metadata by default; this many bits take 2,732.
MAX_SPAN = 16_384
_VERSION = "1:"


class SourceWindow:
    """`next_offset` is where to read on. Offsets open in ascending order and are answered in any; each counts
    as one open request, until `weigh` says how many it is."""

    def __init__(self, committed: int, metadata: str = "") -> None:
        """Raises ValueError when `metadata` was not written by `commit`."""
        self.next_offset = committed
        self._open: dict[int, int] = {}
        self._requests = 0
        self._answered = _decode(committed, metadata)

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def low(self) -> int:
        """The lowest offset not answered."""
        return next(iter(self._open), self.next_offset)

    def room(self, limit: int) -> int:
        """How many more records may be read with at most `limit` requests open."""
        return max(0, min(limit - self._requests, self.low + MAX_SPAN - self.next_offset))

    def take(self, offset: int) -> bool:
        """Notes that `offset` was read. True when it opens, False when an earlier life answered it."""
        if offset < self.next_offset:
            raise ValueError(f"offset {offset} was read before; next is {self.next_offset}")
        self.next_offset = offset + 1
        if offset in self._answered:
            return False
        self._open[offset] = 1
        self._requests += 1
        return True

    def weigh(self, offset: int, requests: int) -> None:
        """The open record is so many requests."""
        self._requests += requests - self._open[offset]
        self._open[offset] = requests

    def answer(self, offset: int) -> None:
        """Notes that the answer to an open record is part of the next commit."""
        self._requests -= self._open.pop(offset)
        self._answered.add(offset)

    def commit(self) -> tuple[int, str]:
        """(offset, metadata) of the state as it is."""
        low = self.low
        self._answered = {offset for offset in self._answered if offset >= low}
        if not self._answered:
            return low, ""
        bits = sum(1 << offset - low for offset in self._answered)
        raw = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        return low, _VERSION + base64.b64encode(raw).decode()


def _decode(low: int, metadata: str) -> set[int]:
    if not metadata:
        return set()
    if not metadata.startswith(_VERSION):
        raise ValueError(f"commit metadata of another kind: {metadata[:20]!r}")
    try:
        raw = base64.b64decode(metadata.removeprefix(_VERSION), validate=True)
    except binascii.Error as e:
        raise ValueError(f"commit metadata is broken: {e}") from None
    bits = int.from_bytes(raw, "little")
    return {low + i for i in range(bits.bit_length()) if bits >> i & 1}
