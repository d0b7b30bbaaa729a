"""Up to where everything in a gateway slot's reply partitions has come to its end: kept in Kafka.

A consumer group of the slot's name holds one offset a partition. Nobody is a member, so nothing rebalances:
who follows the partitions, the slot's gateway or a successor, commits by hand.
"""

from collections.abc import Iterable, Mapping

from aiokafka import AIOKafkaConsumer, TopicPartition

from gateway.owner import reply_partitions
from schemas import topics
from schemas.fleet import CONSUMER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.stop_client import stop_client

_STOP_S = 5.0


def reply_consumer(bootstrap_servers: str, slot: int) -> AIOKafkaConsumer:
    """A consumer that may read and commit the offsets of a slot."""
    return AIOKafkaConsumer(
        **client_settings(bootstrap_servers), group_id=f"headrace-gateway-{slot}", **CONSUMER_SETTINGS
    )


def reply_topics(slot: int) -> list[TopicPartition]:
    return [TopicPartition(topics.TOKENS, p) for p in reply_partitions(slot)]


async def committed(
    consumer: AIOKafkaConsumer, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, int]:
    """Per partition where to read from, within what the log holds; its end where nothing was ever committed.

    Raises KafkaError; the caller sets a deadline.
    """
    asked = list(partitions)
    beginnings = await consumer.beginning_offsets(asked)
    ends = await consumer.end_offsets(asked)
    found = {}
    for partition in asked:
        offset = await consumer.committed(partition)
        end = ends[partition]
        found[partition] = end if offset is None else min(max(offset, beginnings[partition]), end)
    return found


class ReplyOffsets:
    """Commits a slot's offsets, beside the consumer that reads its partitions at once."""

    def __init__(self, bootstrap_servers: str, slot: int) -> None:
        self.partitions = reply_topics(slot)
        self._consumer = reply_consumer(bootstrap_servers, slot)

    async def start(self) -> dict[TopicPartition, int]:
        """What the slot's last life, or who followed it, has committed: see `committed`.

        Raises KafkaError; the caller sets a deadline.
        """
        await self._consumer.start()
        places = await committed(self._consumer, self.partitions)
        # A commit is for assigned partitions only. With nothing awaited in between: nothing is to be fetched.
        self._consumer.assign(self.partitions)
        self._consumer.pause(*self.partitions)
        for partition, offset in places.items():
            self._consumer.seek(partition, offset)
        # From here on a successor knows where to begin, if this life ends before its first commit.
        await self._consumer.commit(places)
        return places

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Raises KafkaError; the caller sets a deadline."""
        await self._consumer.commit(dict(offsets))

    async def stop(self) -> None:
        await stop_client(self._consumer, _STOP_S)
