"""Which objects of the object store have had their time. Pure.

A file's is told by its note. What no note speaks of was begun and not finished, or is left of what was
deleted, or was written by a coordinator that had been taken over from.
"""

from schemas.stored_files import ObjectName, StoredFile
from schemas.topics import DAY_MS

# As long as what no note speaks of may still become a file.
UNNOTED_MS = DAY_MS
# A batch notes its results when it ends: within its window of 7 days at most, and a day to finish.
LONGEST_BATCH_MS = 8 * DAY_MS


def has_expired(file: StoredFile, now_ms: int) -> bool:
    return file.expires_at <= now_ms


def may_be_orphan(name: ObjectName, modified_ms: int, now_ms: int) -> bool:
    """It is old enough for its note to be asked for."""
    return name.role != "note" and now_ms - modified_ms >= UNNOTED_MS


def is_orphan(name: ObjectName, path: str, note: StoredFile | None, now_ms: int) -> bool:
    """Nobody needs it, of what `may_be_orphan`; `note` is that of its file, None where there is none."""
    if note is None:
        return name.role != "part" or now_ms - name.made_at >= LONGEST_BATCH_MS
    return all(part.name != path for part in note.parts)
