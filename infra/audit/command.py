"""`headrace audit`: runs it, and prints what was found."""

import json
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from infra.audit.audit import Settings, audit
from infra.audit.clients import ClientRecord, read_client_records
from infra.audit.findings import Report
from infra.replay.command import parse_time
from schemas import topics
from schemas.object_store import open_store
from schemas.topics import Layout

_SHOWN = 50
# What is about to age out may be gone before it is read.
_KEPT = timedelta(milliseconds=topics.TOKENS_RETENTION_MS - topics.HOUR_MS // 12)


async def run_audit(
    servers: str,
    layout: Layout,
    *,
    sql: str,
    since: str,
    objects: str | None,
    clients: Path | None,
    settle_s: float,
    passes: int,
) -> Report:
    """Raises ValueError for bad options, AuditError where something does not answer."""
    now = datetime.now(UTC)
    begin = parse_time(since, now)
    if begin < now - _KEPT:
        hours = topics.TOKENS_RETENTION_MS // topics.HOUR_MS
        raise ValueError(
            f"--since {begin.isoformat()}: {topics.TOKENS} is kept for {hours} h: name a later time"
        )
    received: dict[bytes, list[ClientRecord]] = {}
    if clients is not None:
        with clients.open("rb") as lines:
            received = read_client_records(lines)
    settings = Settings(
        since_ms=int(begin.timestamp() * 1_000),
        sql=sql,
        objects=None if objects is None else open_store(objects),
        settle_s=settle_s,
        passes=passes,
    )
    return await audit(servers, layout, settings, received)


def show(report: Report, console: Console) -> None:
    """For people: what was looked at, then the findings by kind."""
    told = ", ".join(f"{count:,} {name}" for name, count in report.looked_at.items())
    console.print(f"looked at: {told}")
    for each in report.not_judged:
        console.print(f"not judged: {each}")
    if report.clean:
        console.print("nothing found")
        return
    kinds = Counter(finding.kind.value for finding in report.findings)
    table = Table("kind", "request", "tenant", "figures", title=f"{len(report.findings):,} findings")
    for finding in report.findings[:_SHOWN]:
        figures = " ".join(f"{name}={value}" for name, value in finding.figures.items())
        table.add_row(finding.kind.value, finding.request_id or "", finding.tenant or "", figures)
    console.print(table)
    console.print(", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items())))


def to_json(report: Report) -> str:
    """One object: `clean`, `looked_at`, `not_judged`, `findings`."""
    return json.dumps(
        {
            "clean": report.clean,
            "looked_at": report.looked_at,
            "not_judged": report.not_judged,
            "findings": [asdict(finding) for finding in report.findings],
        }
    )
