"""Opens the tables, as soon as their server lets it."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from streams.ledger.clickhouse import BillingStore, MigrationError, chdb_folder

log = logging.getLogger(__name__)

# Of one try: until it is connected, and then for each answer.
CONNECT_S = 5
ANSWER_S = 60
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 5.0


async def open_tables(dsn: str, ddl_dir: Path, on_away: Callable[[str], None]) -> BillingStore:
    """Returns when the tables are as this release needs them.

    A server may be away, or still starting, for as long as it takes: `on_away` is told why, after each try.
    What waiting does not mend is raised: MigrationError, and whatever an embedded engine says.
    """
    wait_s = FIRST_RETRY_S
    while True:
        try:
            return await asyncio.to_thread(_open, dsn, ddl_dir)
        except MigrationError:
            raise
        except Exception as e:
            if chdb_folder(dsn) is not None:
                raise
            reason = str(e) or repr(e)
            log.warning("ClickHouse cannot be opened", extra={"error": reason, "wait_s": wait_s})
            on_away(f"waiting for ClickHouse: {reason}")
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, MAX_RETRY_S)


def _open(dsn: str, ddl_dir: Path) -> BillingStore:
    store = BillingStore(dsn, connect_s=CONNECT_S, answer_s=ANSWER_S)
    try:
        applied = store.migrate(ddl_dir)
    except BaseException:
        store.close()
        raise
    if applied:
        log.info("schema files applied", extra={"files": applied})
    return store
