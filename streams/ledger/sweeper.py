"""Takes files and orphaned objects out of the object store when their time is over (retention.py)."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec
import obstore
from obstore.store import ObjectStore

from schemas.clock import epoch_ms
from schemas.stored_files import ObjectName, StoredFile, noted, parse_name
from streams.ledger.metrics import SWEPT
from streams.ledger.retention import has_expired, is_orphan, may_be_orphan

log = logging.getLogger(__name__)

_PREFIXES = ("files", "batches")
_NAMES_AT_ONCE = 1_000
_OBJECTS_AT_ONCE = 16
_TIMEOUT_S = 30.0
# A note is asked for once for all the parts that it speaks of, which stores list one after another.
_KEPT_NOTES = 256
_LOOK_S = 1.0


class Swept(NamedTuple):
    files: int
    orphans: int


class Sweeper:
    """`sweep` may be run by two processes at a time, and be broken off anywhere: it is done again."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._notes: dict[tuple[str, str], StoredFile | None] = {}

    async def sweep(self, now_ms: int) -> Swept:
        """One look at everything. Raises what the store raises, TimeoutError."""
        self._notes.clear()
        files = orphans = 0
        for prefix in _PREFIXES:
            listing = obstore.list(self._store, prefix, chunk_size=_NAMES_AT_ONCE)
            async for metas in listing:
                for start in range(0, len(metas), _OBJECTS_AT_ONCE):
                    some = metas[start : start + _OBJECTS_AT_ONCE]
                    looks = [
                        self._try(meta["path"], int(meta["last_modified"].timestamp() * 1000), now_ms)
                        for meta in some
                    ]
                    for swept in await asyncio.gather(*looks):
                        files += swept.files
                        orphans += swept.orphans
        return Swept(files, orphans)

    async def _try(self, path: str, modified_ms: int, now_ms: int) -> Swept:
        try:
            return await self._look(path, modified_ms, now_ms)
        except msgspec.MsgspecError as e:
            log.error("what is noted of a file cannot be read", extra={"path": path, "error": str(e)})
            return Swept(0, 0)

    async def _look(self, path: str, modified_ms: int, now_ms: int) -> Swept:
        name = parse_name(path)
        if name is None:
            return Swept(0, 0)
        if name.role == "note":
            note = await self._note(name)
            if note is None or not has_expired(note, now_ms):
                return Swept(0, 0)
            # The note first: whoever reads sees no file that lacks bytes.
            for each in (path, *(part.name for part in note.parts)):
                await self._delete(each)
            return Swept(1, 0)
        if not may_be_orphan(name, modified_ms, now_ms):
            return Swept(0, 0)
        if not is_orphan(name, path, await self._note(name), now_ms):
            return Swept(0, 0)
        await self._delete(path)
        return Swept(0, 1)

    async def _note(self, name: ObjectName) -> StoredFile | None:
        key = name.tenant, name.file_id
        if key not in self._notes:
            if len(self._notes) >= _KEPT_NOTES:
                self._notes.clear()
            self._notes[key] = await self._read(noted(*key))
        return self._notes[key]

    async def _read(self, path: str) -> StoredFile | None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await obstore.get_async(self._store, path)
                text = bytes(await answer.bytes_async())
        except FileNotFoundError:
            return None
        return msgspec.json.decode(text, type=StoredFile)

    async def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            async with asyncio.timeout(_TIMEOUT_S):
                await obstore.delete_async(self._store, path)


async def keep_swept(
    store: ObjectStore, every_s: float, is_ours: Callable[[], bool], look_s: float = _LOOK_S
) -> None:
    """Sweeps now and then, while `is_ours` says that this process is the one to do it."""
    sweeper = Sweeper(store)
    due = time.monotonic()
    while True:
        if is_ours() and time.monotonic() >= due:
            try:
                swept = await sweeper.sweep(epoch_ms())
                SWEPT.labels("file").inc(swept.files)
                SWEPT.labels("orphan").inc(swept.orphans)
                if swept.files or swept.orphans:
                    log.info("swept", extra={"files": swept.files, "orphans": swept.orphans})
            except Exception as e:
                # Its first line: what follows may be the store's whole answer.
                log.warning("the object store could not be swept", extra={"error": f"{e!r:.300}"})
            due = time.monotonic() + every_s
        await asyncio.sleep(look_s)
