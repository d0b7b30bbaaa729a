"""`headrace replay`: reads what was recorded, asks the policy, prints what is different."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from rich.console import Console
from rich.table import Table

from infra.replay.comparison import compare
from infra.replay.policy import ShippedPolicy, load_policy
from infra.replay.recording import Recording
from schemas import topics
from schemas.codec import CodecError, decode
from schemas.fleet import CONSUMER_SETTINGS
from schemas.records import Decision, Usage
from schemas.topics import Layout

# A request and its usage row take about 2 KB here.
MAX_RECORDS = 2_000_000
# Usage comes when a request ends: rows of what began before `until` are looked for so long after.
_USAGE_AFTER = timedelta(minutes=10)
_AGO = re.compile(r"(\d+)([smh])")
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
    servers: str, layout: Layout, since: str, until: str | None, policy_path: Path | None
) -> dict[str, Any]:
    """The figures of `Comparison`. Raises ValueError for bad times, a bad policy, or too many records."""
    now = datetime.now(UTC)
    begin = parse_time(since, now)
    end = now if until is None else parse_time(until, now)
    if begin >= end:
        raise ValueError(f"--from {begin.isoformat()} is not before --to {end.isoformat()}")
    policy = ShippedPolicy() if policy_path is None else load_policy(policy_path)
    recording = await read(servers, layout, begin, end)
    figures = compare(policy, recording.requests()).figures()
    return {"from": begin.isoformat(), "to": end.isoformat(), **figures, "unseen": recording.num_unseen}


async def read(servers: str, layout: Layout, begin: datetime, end: datetime) -> Recording:
    """What lies in the log between two times, by the broker's clock; of usage, somewhat more."""
    recording = Recording()
    consumer = AIOKafkaConsumer(bootstrap_servers=servers, **CONSUMER_SETTINGS)
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
    starts = await _offsets_at(consumer, partitions, begin)
    stops = await _offsets_at(consumer, partitions, end)
    left = {p: stops.get(p, ends[p]) for p in partitions if starts.get(p, ends[p]) < stops.get(p, ends[p])}
    consumer.assign(list(left))
    for partition in left:
        consumer.seek(partition, starts[partition])
    while left:
        for partition, records in (await consumer.getmany(timeout_ms=500)).items():
            for record in records:
                if record.offset < left.get(partition, 0):
                    _add(record.value, into)
        for partition in list(left):
            if await consumer.position(partition) >= left[partition]:
                del left[partition]
                consumer.pause(partition)


async def _offsets_at(
    consumer: Any, partitions: list[TopicPartition], when: datetime
) -> dict[TopicPartition, int]:
    """The first offset not before a time, of partitions that have one."""
    found = await consumer.offsets_for_times(dict.fromkeys(partitions, int(when.timestamp() * 1_000)))
    return {p: place.offset for p, place in found.items() if place is not None}


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
    table = Table("", "recorded", "replayed", title=f"{figures['requests']:,} requests")
    for name in figures["recorded"]:
        table.add_row(name, *(_text(figures[side][name]) for side in ("recorded", "replayed")))
    console.print(table)
    for name in ("newly_refused", "newly_let_in", "routed_elsewhere", "real_ttft_ms", "real_hit_rate"):
        console.print(f"{name}: {_text(figures[name]) or 'none'}")
    print(json.dumps(figures))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part:,}" for name, part in value.items())
    return f"{value:,}"
