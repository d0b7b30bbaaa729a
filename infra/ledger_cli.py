"""`headrace ledger`: whether the ledger's table is what the log says, and a new one where it is not."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer
from clickhouse_connect.driver.exceptions import Error as ClickHouseError
from obstore.exceptions import BaseError as StoreError

from infra import ledger_check
from infra.command_line import DataDir, Kafka, endpoints, fail, run, servers
from infra.ledger_check import Report
from infra.local.paths import DEFAULT_DATA_DIR
from infra.usage_log import UsageLog, open_usage_log
from streams.ledger.rebuilding import BILL, REPLACED
from streams.ledger.sql_guard import DATABASE

app = typer.Typer(no_args_is_help=True, help="The ledger's table against the log.")

ObjectStore = Annotated[
    str,
    typer.Option(
        envvar="HEADRACE_OBJECT_STORE", help="Where the ledger archives usage; default: infra/up's."
    ),
]
MaxRows = Annotated[int, typer.Option(min=1, help="Name so many differing requests at most.")]


@app.command()
def verify(
    clickhouse: Annotated[
        str,
        typer.Option(
            help="http(s)://user:password@host:port of a server or of the ledger's SQL endpoint, or the "
            "chdb:///folder of a ledger that is stopped; default: infra/up's ledger."
        ),
    ] = "",
    object_store: ObjectStore = "",
    max_rows: MaxRows = 100,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Compute usage anew from archive and topic, and name each request that the table has otherwise.

    It stops nothing: the table is read as anyone reads it, up to what the ledger has committed. The exit
    status is 1 if anything differs.
    """
    dsn = clickhouse or endpoints(data_dir).sql
    report = _run(lambda log: ledger_check.verify(log, dsn, max_rows), kafka, object_store, data_dir)
    _tell(report)
    if report.differences:
        raise typer.Exit(1)


@app.command()
def rebuild(
    clickhouse: Annotated[
        str,
        typer.Option(
            help="chdb:///folder of a ledger that is stopped, or http(s)://user:password@host:port."
        ),
    ] = "",
    swap: Annotated[
        bool, typer.Option("--swap", help="Put the new table in the place of the old one, which is kept.")
    ] = False,
    despite_gaps: Annotated[
        bool, typer.Option("--despite-gaps", help="Also where usage is missing in the log, and so in it.")
    ] = False,
    object_store: ObjectStore = "",
    max_rows: MaxRows = 100,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Make a new table from archive and topic, compare it with the one in use and, if asked to, swap them.

    A ledger that holds its folder itself (chDB) has to be stopped; usage waits in the topic. The exit status
    is 1 if anything differs and is left so.
    """
    dsn = clickhouse or f"chdb://{(data_dir / 'ledger' / 'clickhouse').resolve()}"

    async def work(log: UsageLog) -> Report:
        return await ledger_check.rebuild(log, dsn, max_rows, swap=swap, despite_gaps=despite_gaps)

    report = _run(work, kafka, object_store, data_dir)
    _tell(report)
    if report.swapped:
        print(f"swapped; the old table is {DATABASE}.{BILL}{REPLACED}, until the next swap")
    elif swap:
        raise fail("not swapped: usage is missing in the log; --despite-gaps swaps all the same")
    elif report.differences:
        raise typer.Exit(1)


def _run(
    work: Callable[[UsageLog], Awaitable[Report]], kafka: str, object_store: str, data_dir: Path
) -> Report:
    bootstrap, _ = servers(kafka, data_dir)
    # A ledger's own setting, where this runs in its place.
    objects = object_store or str(data_dir / "objects")

    async def opened() -> Report:
        async with open_usage_log(bootstrap, objects) as log:
            return await work(log)

    try:
        return run(opened())
    except ClickHouseError as e:
        raise fail(f"ClickHouse: {str(e).splitlines()[0]}") from None
    except StoreError as e:
        raise fail(f"the object store: {str(e).splitlines()[0]}") from None


def _tell(report: Report) -> None:
    found = report.differences
    print(f"{report.records} records of usage read")
    for gap in found.gaps:
        print(f"missing in the log: {gap}")
    for day in found.days:
        print(day)
    for row in found.rows:
        print(row)
    if not found:
        print("the table is what the log says")
