"""Reading by hand: partitions that are assigned by no group, from places that are known."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from schemas.codec import CodecError, UnknownSchemaError, decode

log = logging.getLogger(__name__)


class Consumer(Protocol):
    """The part of AIOKafkaConsumer that is needed; `Any` stands for its TopicPartition and record."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def assign(self, partitions: list[Any]) -> None: ...
    def seek(self, partition: Any, offset: int) -> None: ...
    async def position(self, partition: Any) -> int: ...
    async def getmany(
        self, *partitions: Any, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[Any, list[Any]]: ...
    async def beginning_offsets(self, partitions: Iterable[Any]) -> dict[Any, int]: ...
    async def end_offsets(self, partitions: Iterable[Any]) -> dict[Any, int]: ...
    async def offsets_for_times(self, timestamps: dict[Any, int]) -> dict[Any, Any]: ...
    async def topics(self) -> set[str]: ...


async def find_leaders(consumer: Consumer, *partitions: Any) -> None:
    """Has the consumer learn where these lie, so that its first question about them is answered at once.

    aiokafka finds a topic's leaders when it is first asked about it, 100 ms later, one topic after another.
    """
    await asyncio.gather(*(consumer.end_offsets([partition]) for partition in partitions))


def assign_at(consumer: Consumer, places: Mapping[Any, int]) -> None:
    """Has the consumer read these partitions from these offsets, and no others.

    No coroutine, so that nothing runs in between: a partition without a place is an error to the consumer.
    """
    consumer.assign(list(places))
    for partition, offset in places.items():
        consumer.seek(partition, offset)


def decoded(record: Any, *kinds: type) -> Any:
    """The record, or None with a word in the log: one that cannot be read must not stop its reader."""
    try:
        value = decode(record.value or b"")
    except CodecError as error:
        log.warning("%s partition %d offset %d: %s", record.topic, record.partition, record.offset, error)
        return None
    if isinstance(value, kinds):
        return value
    log.warning("%s offset %d holds a %s", record.topic, record.offset, type(value).__name__)
    return None


async def decode_or_catch_up(value: bytes, catch_up: Callable[[], Awaitable[None]]) -> Any:
    """The record. `catch_up` reads control.schemas to its end. Raises CodecError."""
    try:
        return decode(value)
    except UnknownSchemaError:
        # Writers publish a schema before they use it, so it is there by now if it ever will be.
        await catch_up()
        return decode(value)
