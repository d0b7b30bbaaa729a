"""What the audit reads: topics up to a mark, admission's reservations, billed rows, result files."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Self

import httpx
import msgspec
import obstore
from aiokafka import AIOKafkaConsumer, TopicPartition
from obstore.store import ObjectStore

from infra.audit.checks import BilledRow
from infra.audit.fleet import Reservation
from infra.topic_scan import offsets_at, scan
from schemas import topics
from schemas.codec import CodecError, decode, default_codec
from schemas.fleet import BUSY_CONSUMER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.records import BatchState
from schemas.stored_files import Kind, object_parts
from schemas.topics import Layout

HTTP_TIMEOUT_S = 60.0
_KINDS: tuple[Kind, ...] = ("output", "error")
_ROWS = (
    "SELECT request_id, tenant, toString(version), input_tokens, output_tokens,"
    " toUnixTimestamp64Milli(accepted_at) FROM headrace.usage_final"
    " WHERE accepted_at >= fromUnixTimestamp64Milli(toInt64({since}))"
)
# As RequestLog.has.
_OF_PASS = (
    " AND modulo(reinterpretAsUInt32(reverse(unhex(substring(request_id, 1, 4)))), {passes}) = {number}"
)

Take = Callable[[Any, Any], None]


class AuditError(RuntimeError):
    """Something that the audit needs did not answer; the message names it."""


class _LineId(msgspec.Struct):
    id: str


class TopicReader:
    """`ends` of topics, once they were looked at, stay: all passes read the same records."""

    def __init__(self, consumer: Any, committed: Any, layout: Layout, since_ms: int) -> None:
        self._consumer = consumer
        self._committed = committed
        self._counts = {spec.name: spec.partitions for spec in topics.topic_specs(layout)}
        self._since_ms = since_ms
        self._ends: dict[str, dict[Any, int]] = {}
        self.unreadable: Counter[str] = Counter()

    @classmethod
    @asynccontextmanager
    async def open(cls, servers: str, layout: Layout, since_ms: int) -> AsyncIterator[Self]:
        plain = AIOKafkaConsumer(**client_settings(servers), **BUSY_CONSUMER_SETTINGS)
        committed = AIOKafkaConsumer(
            **client_settings(servers), isolation_level="read_committed", **BUSY_CONSUMER_SETTINGS
        )
        try:
            await plain.start()
            await committed.start()
            reader = cls(plain, committed, layout, since_ms)
            await reader._learn_schemas()
            yield reader
        finally:
            await plain.stop()
            await committed.stop()

    async def mark(self, *names: str) -> None:
        """These are read up to where they end now."""
        for name in names:
            self._ends[name] = await self._consumer.end_offsets(self._partitions(name))

    async def came_since(self, name: str, kind: type) -> bool:
        """Whether a record of this kind was added since `mark`."""
        ends = await self._consumer.end_offsets(self._partitions(name))
        found = False

        def take(value: Any, record: Any) -> None:
            nonlocal found
            found = found or isinstance(value, kind)

        await scan(self._consumer, self._ends[name], ends, self._decoding(name, take))
        return found

    async def read(self, name: str, take: Take, margin_ms: int = 0) -> None:
        """From `margin_ms` before the time that is looked at up to the mark, partition by partition in order;
        `take` gets the decoded record and Kafka's. What cannot be decoded is counted."""
        since = self._since_ms - margin_ms
        await self._read(self._consumer, self._ends[name], since, self._decoding(name, take))

    async def read_all(self, name: str, take: Take) -> None:
        """A compacted topic, from its beginning to its end now."""
        partitions = self._partitions(name)
        starts = await self._consumer.beginning_offsets(partitions)
        stops = await self._consumer.end_offsets(partitions)
        await scan(self._consumer, starts, stops, self._decoding(name, take))

    async def tenants_with_doors(self) -> list[str]:
        """Whose `batch.requests.<tenant>` there are."""
        found = (topics.tenant_of_batch_topic(name) for name in await self._consumer.topics())
        return sorted(tenant for tenant in found if tenant is not None)

    async def mark_doors(self, tenants: Iterable[str], name: Callable[[str], str]) -> None:
        for tenant in tenants:
            place = [TopicPartition(name(tenant), 0)]
            self._ends[name(tenant)] = await self._committed.end_offsets(place)

    async def read_door(self, name: str, take: Callable[[Any], None], margin_ms: int) -> None:
        """Committed records as they lie there."""
        await self._read(self._committed, self._ends[name], self._since_ms - margin_ms, take)

    async def read_last(self, name: str, seconds: float, take: Take) -> None:
        """What was appended in the last seconds before now."""
        since = int((datetime.now(UTC).timestamp() - seconds) * 1_000)
        ends = await self._consumer.end_offsets(self._partitions(name))
        await self._read(self._consumer, ends, since, self._decoding(name, take))

    async def _read(
        self, consumer: Any, ends: dict[Any, int], since_ms: int, take: Callable[[Any], None]
    ) -> None:
        when = datetime.fromtimestamp(since_ms / 1_000, UTC)
        begins = await offsets_at(consumer, ends, when)
        await scan(consumer, {place: begins.get(place, ends[place]) for place in ends}, ends, take)

    def _decoding(self, name: str, take: Take) -> Callable[[Any], None]:
        def decoded(record: Any) -> None:
            if record.value is None:
                return  # what a compacted topic had there is gone
            try:
                value = decode(record.value)
            except CodecError:
                self.unreadable[name] += 1
                return
            take(value, record)

        return decoded

    async def _learn_schemas(self) -> None:
        partitions = self._partitions(topics.SCHEMAS)
        starts = await self._consumer.beginning_offsets(partitions)
        stops = await self._consumer.end_offsets(partitions)
        await scan(self._consumer, starts, stops, _learn)

    def _partitions(self, name: str) -> list[TopicPartition]:
        return [TopicPartition(name, number) for number in range(self._counts[name])]


def _learn(record: Any) -> None:
    # Another release's records of other kinds are counted where they are met.
    with suppress(CodecError):
        default_codec().learn((record.value or b"").decode(errors="replace"))


async def read_billed(url: str, since_ms: int, number: int, passes: int) -> list[BilledRow]:
    """The rows that the billing table shows, of one pass. Raises AuditError."""
    query = _ROWS.format(since=since_ms)
    if passes > 1:
        query += _OF_PASS.format(passes=passes, number=number)
    query += " FORMAT JSONCompactEachRow"
    async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_S) as client:
        try:
            answer = await client.post(url, content=query.encode())
        except httpx.HTTPError as e:
            raise AuditError(f"no answer from {url} ({type(e).__name__}): is the ledger up?") from None
    if answer.status_code != 200:
        raise AuditError(f"{url}: {answer.text.strip()[:500]}")
    found = msgspec.json.decode(b"[" + b",".join(answer.content.splitlines()) + b"]")
    return [BilledRow(row[0], row[1], *map(int, row[2:])) for row in found]


async def read_reservations(addresses: Iterable[str]) -> list[Reservation]:
    """What admission processes hold open. Raises AuditError."""
    found = []
    async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_S) as client:
        for address in addresses:
            try:
                answer = await client.get(f"{address}/reservations")
            except httpx.HTTPError as e:
                raise AuditError(f"admission at {address} does not answer ({type(e).__name__})") from None
            if answer.status_code != 200:
                raise AuditError(f"admission at {address} answers {answer.status_code} for /reservations")
            for line in answer.content.splitlines():
                told = msgspec.json.decode(line)
                found.append(Reservation(**{**told, "request_id": bytes.fromhex(told["request_id"])}))
    return found


async def read_result_lines(store: ObjectStore, state: BatchState) -> dict[str, Counter[str]]:
    """By kind, the ids of all lines that the state speaks of. Raises AuditError."""
    lines: dict[str, Counter[str]] = {}
    for kind, parts in zip(_KINDS, (state.output, state.error_output), strict=True):
        ids = lines[kind] = Counter()
        for part in object_parts(state.tenant, state.batch_id, kind, parts):
            try:
                data = await obstore.get_range_async(store, part.name, start=0, end=part.size)
            except Exception as e:  # whatever a store may say
                raise AuditError(f"object {part.name}: {str(e)[:300]}") from e
            ids.update(msgspec.json.decode(line, type=_LineId).id for line in bytes(data).splitlines())
    return lines
