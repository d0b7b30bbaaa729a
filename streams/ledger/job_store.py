"""What a job reads and writes in the object store. Every wait has a deadline; what fails is tried again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import obstore
from obstore.store import ObjectStore

from schemas.stored_files import StoredFile, noted
from streams.ledger.metrics import STORE_FAILURES

log = logging.getLogger(__name__)

TIMEOUT_S = 90.0
FIRST_RETRY_S = 0.5
MAX_RETRY_S = 5.0
T = TypeVar("T")


class InputGoneError(Exception):
    """The input file, or a part of it, is not there any more."""


class JobStore:
    """Returns when it is done, however long that takes."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def find(self, tenant: str, file_id: str) -> StoredFile:
        """Raises InputGoneError."""

        async def find() -> StoredFile:
            answer = await obstore.get_async(self._store, noted(tenant, file_id))
            return msgspec.json.decode(memoryview(await answer.bytes_async()), type=StoredFile)

        return await self._read(f"{tenant}/{file_id}", find)

    async def read(self, file: StoredFile, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`, or fewer: at least one where the file has any there. Raises
        InputGoneError."""
        for part in file.parts:
            if offset < part.size:
                name, start, end = part.name, offset, min(offset + size, part.size)
                break
            offset -= part.size
        else:
            return b""

        async def read() -> bytes:
            return bytes(await obstore.get_range_async(self._store, name, start=start, end=end))

        return await self._read(name, read)

    async def write(self, name: str, data: bytes) -> None:
        async def write() -> None:
            try:
                await obstore.put_async(self._store, name, data)
            except FileNotFoundError as e:
                raise RuntimeError(f"there is no place for it: {e}") from e  # a bucket that may come back

        await keep_trying(name, write)

    async def note(self, file: StoredFile) -> None:
        await self.write(noted(file.tenant, file.id), msgspec.json.encode(file))

    async def _read(self, name: str, read: Callable[[], Awaitable[T]]) -> T:
        try:
            return await keep_trying(name, read)
        except FileNotFoundError as e:
            raise InputGoneError(name) from e


async def keep_trying(name: str, operation: Callable[[], Awaitable[T]]) -> T:
    """Raises FileNotFoundError alone."""
    wait_s = FIRST_RETRY_S
    while True:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await operation()
        except FileNotFoundError:
            raise
        except Exception as e:  # whatever a store may say: away, full, denied
            STORE_FAILURES.inc()
            log.warning(
                "the object store failed; trying again",
                extra={"object": name, "wait_s": wait_s, "error": str(e)[:300] or repr(e)},
            )
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, MAX_RETRY_S)
