"""`headrace replay`: reads what was recorded, asks the policy, prints what is different."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from rich.console import Console
from rich.table import Table

from infra.replay.closed_loop import ClosedLoop
from infra.replay.comparison import compare
from infra.replay.outcome import differences, outcome
from infra.replay.policy import Policy, ShippedPolicy, load_policy
from infra.replay.recording import Recording
from infra.tenants import read_tenants
from infra.topic_scan import offsets_at, scan
from schemas import topics
from schemas.codec import CodecError, decode
from schemas.fleet import BUSY_CONSUMER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.records import Decision, Usage
from schemas.topics import Layout

# A request and its usage row take about 2 KB here.
MAX_RECORDS = 2_000_000
# Usage comes when a request ends: rows of what began before `until` are looked for so long after.
_USAGE_AFTER = timedelta(minutes=10)
_AGO = re.compile(r"(\d+)([smh])")
_SIDES = ("recorded", "replayed", "shipped", "policy")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours"}


def parse_time(text: str, now: datetime) -> datetime:
    """`10m` ago, or ISO 8601 (UTC where it names no zone). Raises ValueError."""
    if (ago := _AGO.fullmatch(text)) is not None:
        return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no time: use ISO 8601, or 30s, 10m, 2h for so long ago") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


async def replay(
    servers: str,
    layout: Layout,
    since: str,
    until: str | None,
    policy_path: Path | None,
    *,
    closed_loop: bool,
) -> dict[str, Any]:
    """The figures of `Comparison`, or of `carried_forward`.

    Raises ValueError for bad times, a bad policy, or too many records.
    """
    now = datetime.now(UTC)
    begin = parse_time(since, now)
    end = now if until is None else parse_time(until, now)
    if begin >= end:
        raise ValueError(f"--from {begin.isoformat()} is not before --to {end.isoformat()}")
    policy = ShippedPolicy() if policy_path is None else load_policy(policy_path)
    recording = await read(servers, layout, begin, end)
    if closed_loop:
        weights = {name: tenant.weight for name, tenant in (await read_tenants(servers)).items()}
        figures = carried_forward(recording, weights, None if policy_path is None else policy)
    else:
        figures = compare(policy, recording.requests()).figures()
    return {"from": begin.isoformat(), "to": end.isoformat(), **figures, "unseen": recording.num_unseen}


def carried_forward(
    recording: Recording, weights: Mapping[str, float], policy: Policy | None
) -> dict[str, Any]:
    """What was recorded, what the simulated fleet makes of it with the shipped policy, and with `policy`.

    Raises ValueError where the record tells of no fleet, or for a policy that routes to what is no candidate.
    """
    loop, shipped = ClosedLoop(recording.requests(), weights), ShippedPolicy()
    before = loop.run(shipped)
    figures = {
        "requests": len(loop.requests),
        "recorded": outcome(shipped, loop.requests),
        "shipped": outcome(shipped, before.requests()),
    }
    if policy is None:
        return figures
    after = loop.run(policy)
    return {**figures, "policy": outcome(policy, after.requests()), **differences(before, after)}


async def read(servers: str, layout: Layout, begin: datetime, end: datetime) -> Recording:
    """What lies in the log between two times, by the broker's clock; of usage, somewhat more."""
    recording = Recording()
    consumer = AIOKafkaConsumer(**client_settings(servers), **BUSY_CONSUMER_SETTINGS)
    await consumer.start()
    try:
        await _read(consumer, layout, topics.DECISIONS, begin, end, recording)
        await _read(consumer, layout, topics.USAGE, begin, end + _USAGE_AFTER, recording)
    finally:
        await consumer.stop()
    return recording


async def _read(
    consumer: Any, layout: Layout, topic: str, begin: datetime, end: datetime, into: Recording
) -> None:
    counts = {spec.name: spec.partitions for spec in topics.topic_specs(layout)}
    partitions = [TopicPartition(topic, number) for number in range(counts[topic])]
    ends = await consumer.end_offsets(partitions)
    starts = await offsets_at(consumer, partitions, begin)
    stops = await offsets_at(consumer, partitions, end)
    await scan(
        consumer,
        {partition: starts.get(partition, ends[partition]) for partition in partitions},
        {partition: stops.get(partition, ends[partition]) for partition in partitions},
        lambda record: _add(record.value, into),
    )


def _add(value: bytes | None, into: Recording) -> None:
    try:
        record = decode(value or b"")
    except CodecError:
        return
    if isinstance(record, Decision | Usage):
        into.add(record)
        if len(into) > MAX_RECORDS:
            raise ValueError(f"more than {MAX_RECORDS:,} records: name a shorter time with --from and --to")


def show(figures: dict[str, Any], console: Console) -> None:
    """A table for people, then all figures as one line of JSON on standard output."""
    sides = [side for side in _SIDES if side in figures]
    table = Table("", *sides, title=f"{figures['requests']:,} requests")
    for name in figures["recorded"]:
        table.add_row(name, *(_text(figures[side][name]) for side in sides))
    console.print(table)
    for name in ("newly_refused", "newly_let_in", "routed_elsewhere", "real_ttft_ms", "real_hit_rate"):
        if name in figures:
            console.print(f"{name}: {_text(figures[name]) or 'none'}")
    print(json.dumps(figures))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return f"{value:,}"
