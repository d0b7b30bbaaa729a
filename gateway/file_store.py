"""Files in the object store, as gateways write and read them; names and notes are those of stored_files.py.

A file's bytes are written first and its note last, so a file that was begun and not finished is none.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property

import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from schemas.api.errors import ApiError
from schemas.object_store import open_store
from schemas.stored_files import FILE_PREFIX, ObjectPart, StoredFile, files_of, is_id, noted

log = logging.getLogger(__name__)

# Of a write: S3 takes no smaller parts but the last.
_PART_BYTES = 5 << 20
_PARTS_AT_ONCE = 2
_PIECE_BYTES = 1 << 20
_NAMES_AT_ONCE = 200
# In memory while an object is written, and while it is read.
WRITE_BYTES = (_PARTS_AT_ONCE + 1) * _PART_BYTES
READ_BYTES = 2 * _PIECE_BYTES
_NOTE_SUFFIX = ".json"
_RETRY_MS = 5_000


class FileStore:
    """`url`: see open_store. Each wait for the store ends after `timeout_s`.

    All methods raise ApiError 503 where it does not answer in time, or cannot do what it is asked.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self._url)

    def open(self) -> None:
        """Raises ValueError or OSError for a store that cannot be used at all."""
        _ = self._store

    async def write(self, name: str, pieces: AsyncIterator[bytes]) -> None:
        """Writes an object, at most WRITE_BYTES of it in memory. If `pieces` raises, so does this, and there
        is no object; how long it takes for a piece is its own matter."""
        loop = asyncio.get_running_loop()
        # What ends within a part, or is refused there, needs no upload of parts.
        begin, size = [], 0
        async for piece in pieces:
            begin.append(piece)
            size += len(piece)
            if size >= _PART_BYTES:
                break
        else:
            await self._put(name, b"".join(begin))
            return
        with _answers("write"):
            async with asyncio.timeout(self._timeout_s) as deadline:

                async def timed() -> AsyncIterator[bytes]:
                    while begin:
                        yield begin.pop(0)
                    deadline.reschedule(None)
                    async for piece in pieces:
                        deadline.reschedule(loop.time() + self._timeout_s)
                        yield piece
                        deadline.reschedule(None)
                    deadline.reschedule(loop.time() + self._timeout_s)

                await obstore.put_async(
                    self._store, name, timed(), chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
                )

    async def _put(self, name: str, data: bytes) -> None:
        with _answers("write"):
            async with asyncio.timeout(self._timeout_s):
                await obstore.put_async(self._store, name, data, use_multipart=False)

    async def note(self, file: StoredFile) -> None:
        """From here on the file is there."""
        await self._put(noted(file.tenant, file.id), msgspec.json.encode(file))

    async def find(self, tenant: str, file_id: str, now_ms: int) -> StoredFile | None:
        """A tenant's file; None where there is none, or its time is over."""
        if not is_id(file_id, FILE_PREFIX):
            return None
        with _answers("read"):
            async with asyncio.timeout(self._timeout_s):
                try:
                    answer = await obstore.get_async(self._store, noted(tenant, file_id))
                    text = await answer.bytes_async()
                except FileNotFoundError:
                    return None
        file = msgspec.json.decode(bytes(text), type=StoredFile)
        return file if file.expires_at > now_ms else None

    async def ids(self, tenant: str) -> list[str]:
        """Of all files that are noted, expired ones among them; in the order of time."""
        found: list[str] = []
        prefix = files_of(tenant)
        with _answers("list"):
            async with asyncio.timeout(self._timeout_s):
                async for metas in obstore.list(self._store, prefix, chunk_size=_NAMES_AT_ONCE):
                    names = (meta["path"].removeprefix(prefix) for meta in metas)
                    found += [
                        name.removesuffix(_NOTE_SUFFIX) for name in names if name.endswith(_NOTE_SUFFIX)
                    ]
        return sorted(name for name in found if is_id(name, FILE_PREFIX))

    async def read(self, parts: list[ObjectPart]) -> AsyncIterator[bytes]:
        """The bytes of a file, in pieces of 1 MiB at most. Raises FileNotFoundError where some are gone."""
        for part in parts:
            for start in range(0, part.size, _PIECE_BYTES):
                end = min(start + _PIECE_BYTES, part.size)
                with _answers("read"):
                    async with asyncio.timeout(self._timeout_s):
                        piece = await obstore.get_range_async(self._store, part.name, start=start, end=end)
                if len(piece) != end - start:
                    raise FileNotFoundError(f"{part.name} has less than {end} bytes")
                yield piece.to_bytes()

    async def delete(self, file: StoredFile) -> None:
        """The note first: what is left if the rest fails is nobody's, and swept away later."""
        names = [noted(file.tenant, file.id), *(part.name for part in file.parts)]
        for name in names:
            await self.remove(name)

    async def remove(self, name: str) -> None:
        """An object, which need not be there."""
        with _answers("delete"):
            async with asyncio.timeout(self._timeout_s):
                with suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, name)


@contextmanager
def _answers(verb: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (TimeoutError, BaseError, OSError) as e:
        # Its first line: what follows may be the store's whole answer.
        log.warning("the object store failed", extra={"verb": verb, "error": f"{e!r:.300}"})
        message = "the object store does not answer; try again"
        raise ApiError(503, "object_store_unavailable", message, None, _RETRY_MS) from e
