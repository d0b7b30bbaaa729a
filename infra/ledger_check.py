"""The ledger's table against archive and topic: `verify` names what differs, `rebuild` makes another table.

chDB's folder belongs to one process. `verify` reads it through the ledger's SQL endpoint and computes in a
folder of its own, so nothing is stopped. `rebuild` writes: it takes the folder's lock, which a ledger must
have given up. That is no loss (what it has not billed lies in the topic), and a repair does not run in the
process whose table is in doubt. On a server both run beside the ledger.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.usage_log import UsageLog
from streams.ledger.clickhouse import BillingStore, chdb_folder
from streams.ledger.comparison import UsageTable
from streams.ledger.config import DDL_DIR
from streams.ledger.folder_lock import FolderLock
from streams.ledger.rebuilding import Rebuilding
from streams.ledger.recomputation import Differences, compare, recompute

_NO_SLOT = -1


class FolderInUseError(ValueError):
    """A ledger has the folder; the message says which."""


@dataclass(frozen=True, slots=True)
class Report:
    """`records` of usage were read."""

    records: int
    differences: Differences
    swapped: bool = False


async def verify(log: UsageLog, dsn: str, max_rows: int) -> Report:
    """Raises FolderInUseError, and what the log and ClickHouse raise."""
    if chdb_folder(dsn) is not None:
        return await rebuild(log, dsn, max_rows, swap=False)
    with opened(dsn) as store, _scratch() as scratch:
        ends = await log.committed()
        building = Rebuilding(scratch)
        count = await recompute(log.history, ends, building)
        found = await compare(building.rebuilt, UsageTable(store.ask), lambda: log.since(ends), max_rows)
        found.gaps = log.history.gaps
        return Report(count, found)


async def rebuild(
    log: UsageLog, dsn: str, max_rows: int, *, swap: bool, despite_gaps: bool = False
) -> Report:
    """With `swap` the new table takes the old one's place, and so does that of all versions, but not where
    the log has gaps, which the old ones may know of: only `despite_gaps`. Without, it is dropped again.
    Raises as `verify`.

    1. All up to what the ledger has committed goes into a new table. 2. That is compared with the one in use.
    3. They are exchanged. 4. What has come since goes into the new one too: a ledger that runs on a server
    inserted it into the old one until then. If the process dies between 3 and 4, a ledger that is started
    goes on behind what it had committed, which is where 1 ended; beside one that ran on, do it again.
    """
    with opened(dsn) as store:
        ends = await log.committed()
        building = await asyncio.to_thread(partial(Rebuilding, store, to_swap=swap))
        count = await recompute(log.history, ends, building)
        found = await compare(building.rebuilt, building.in_use, lambda: log.since(ends), max_rows)
        found.gaps = log.history.gaps
        swapped = swap and (despite_gaps or not found.gaps)
        if swapped:
            await asyncio.to_thread(building.swap)
            await asyncio.to_thread(store.insert, await log.since(ends))
        else:
            await asyncio.to_thread(building.drop)
        return Report(count, found, swapped)


@contextmanager
def opened(dsn: str) -> Iterator[BillingStore]:
    """The database; a folder only while no ledger has it. Raises FolderInUseError."""
    folder = chdb_folder(dsn)
    lock = None
    if folder is not None:
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder")
        lock = FolderLock(folder)
        if (holder := lock.try_acquire(_NO_SLOT)) is not None:
            raise FolderInUseError(
                f"{folder} is held by the ledger of slot {holder.get('slot', '?')}, "
                f"pid {holder.get('pid', '?')}: stop it and its standbys first. "
                "What they do not bill meanwhile waits in the topic"
            )
    try:
        store = BillingStore(dsn)
        try:
            yield store
        finally:
            store.close()
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def _scratch() -> Iterator[BillingStore]:
    with TemporaryDirectory(prefix="headrace-verify-") as folder:
        store = BillingStore(f"chdb://{Path(folder) / 'clickhouse'}")
        try:
            store.migrate(DDL_DIR)
            yield store
        finally:
            store.close()
