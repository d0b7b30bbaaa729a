"""`headrace tenant spend`: who has spent how much of its budget."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from infra.command_line import DataDir, Kafka, run, servers
from infra.local.paths import DEFAULT_DATA_DIR
from infra.spend import read_standings
from infra.tenants import read_tenants


def spend(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show what each tenant that has a budget has spent of it this month (UTC)."""
    bootstrap, _ = servers(kafka, data_dir)

    async def read() -> list[dict[str, Any]]:
        standings = await read_standings(bootstrap, (await read_tenants(bootstrap)).values())
        return [{"tenant": name, **standing.view()} for name, standing in sorted(standings.items())]

    found = run(read())
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table("tenant", "month", "spent", "budget", "currency", "stopped", "told at")
    for each in found:
        texts = [str(each[name]) for name in ("tenant", "month", "spent", "budget", "currency")]
        table.add_row(*texts, "yes" if each["stopped"] else "", "\n".join(each["alerted"]))
    Console().print(table)
