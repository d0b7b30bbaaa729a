"""Which partitions of inference.requests this process serves, and from which offset.

There are no tables, so what an earlier holder had queued is gone. The new one takes the partition's end
as its takeover offset, says so in its heartbeat, and skips what lies below: owners of such requests send
them again. So nothing is served twice and nobody waits for a replay.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    takeover_offset: int
    read_offset: int
    superseded: bool = False


class Takeover:
    """Pure. Fed by the consumer group's assignments and other processes' heartbeats."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def assign(self, end_offsets: Mapping[int, int]) -> set[int]:
        """The new assignment, each with its end offset now; returns the partitions that went away.

        A partition that was held all along goes on where it was, as no one else was heard to hold it.
        """
        lost = {p for p, held in self._held.items() if p not in end_offsets or held.superseded}
        for partition in lost:
            del self._held[partition]
        for partition, end in end_offsets.items():
            if partition not in self._held:
                self._held[partition] = _Held(end, end)
        return lost

    def heard(self, partition: int, takeover_offset: int) -> bool:
        """Another process says that it took the partition over; True if that ends our hold."""
        held = self._held.get(partition)
        if held is None or held.superseded or takeover_offset <= held.takeover_offset:
            return False
        held.superseded = True
        return True

    def accept(self, partition: int, offset: int) -> bool:
        """Whether the record is for this process to serve, now and for the first time."""
        held = self._held.get(partition)
        if held is None or held.superseded or offset < held.read_offset:
            return False
        held.read_offset = offset + 1
        return True

    def skips(self, partition: int, offset: int) -> bool:
        """Whether the record was for an earlier holder to serve, which maybe did not."""
        held = self._held.get(partition)
        return held is not None and not held.superseded and offset < held.takeover_offset

    def partitions(self) -> list[int]:
        return sorted(p for p, held in self._held.items() if not held.superseded)

    def held(self) -> list[tuple[int, int]]:
        """(partition, takeover offset) of all that are held."""
        return [(p, held.takeover_offset) for p, held in self._held.items() if not held.superseded]

    def offsets(self, partition: int) -> tuple[int, int]:
        """(takeover offset, next offset to be read). Raises KeyError for a partition not held."""
        held = self._held[partition]
        return held.takeover_offset, held.read_offset
