"""Which records of control.tenants and control.models count. Pure.

A record may say in a header which one it replaces, by its offset. It counts only if that is the one in force:
so of two changes made to the same state the second is none, for all readers, and who wrote it sees that when
it is read back. One without the header replaces whatever is there.

Compaction keeps the last record of a name whether it counted or not. So who wrote one that does not count
writes what is in force once more behind it.
"""

from collections.abc import Iterable

REPLACES = "replaces"
NOTHING = -1


def replaces_header(version: int) -> tuple[str, bytes]:
    """`version`: the offset of the record in force, NOTHING where there is none."""
    return REPLACES, str(version).encode()


class ControlLog:
    """Fed with all records of one of the topics, in order."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._deleted: set[str] = set()

    def counts(
        self, name: str, offset: int, headers: Iterable[tuple[str, bytes | None]] | None, deletes: bool
    ) -> bool:
        """Takes the next record; whether it is in force now. `deletes`: it has no value."""
        replaces = next((value for key, value in headers or () if key == REPLACES), None)
        known = self._versions.get(name)
        if replaces is not None and known is not None:
            there = NOTHING if name in self._deleted else known
            if replaces != str(there).encode():
                return False
        self._versions[name] = offset
        (self._deleted.add if deletes else self._deleted.discard)(name)
        return True

    def version(self, name: str) -> int:
        """The offset of the record in force, NOTHING where there is none."""
        return NOTHING if name in self._deleted else self._versions.get(name, NOTHING)
