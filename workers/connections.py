"""A worker's Kafka clients, which must not wait for one another: four producers and two consumers, and one
more of each where it hands KV over."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError

from schemas import topics
from schemas.fleet import (
    BUSY_CONSUMER_SETTINGS,
    CONSUMER_SETTINGS,
    HEARTBEAT_PRODUCER_SETTINGS,
    PRODUCER_SETTINGS,
)
from schemas.kafka_login import client_settings
from schemas.lasting_producer import lasting
from schemas.stop_client import stop_client
from schemas.topics import Layout

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_CLOSE_S = 2.0
_USED = (
    topics.PREFILL,
    topics.TOKENS,
    topics.CANCELLATIONS,
    topics.USAGE,
    topics.HEARTBEATS,
    topics.EVENTS,
    topics.DECISIONS,
    topics.SCHEMAS,
    topics.dlq(topics.PREFILL),
)


_USED_FOR_HANDOFFS = (topics.DECODE, topics.dlq(topics.DECODE))


class KafkaUnavailableError(RuntimeError):
    """Kafka, or the topics on it, are not as the settings say; the message says what to do."""


class _Client(Protocol):
    async def start(self) -> None: ...
    def stop(self) -> Coroutine[Any, Any, None]: ...


C = TypeVar("C", bound=_Client)


@dataclass(frozen=True, slots=True)
class Connections:
    """`usage` also carries what is rare: schemas, fleet events, dead letters."""

    tokens: AIOKafkaProducer
    usage: AIOKafkaProducer
    heartbeats: AIOKafkaProducer
    decisions: AIOKafkaProducer
    mailbox: AIOKafkaConsumer
    cancellations: AIOKafkaConsumer
    handoffs: AIOKafkaProducer | None = None
    fleet: AIOKafkaConsumer | None = None


@contextlib.asynccontextmanager
async def connect(
    bootstrap_servers: str, layout: Layout, timeout: float, *, hands_over: bool = False
) -> AsyncIterator[Connections]:
    """Open clients that know all topics already, so that no first record waits for that. `hands_over`: with
    those for handoffs.

    Raises KafkaUnavailableError after `timeout` seconds, or when a topic is missing or of another size.
    """
    clients: list[_Client] = []

    async def start(make: Callable[[], C]) -> C:
        client = await start_client(make, bootstrap_servers)
        clients.append(client)
        return client

    try:
        try:
            async with asyncio.timeout(timeout):
                settings = client_settings(bootstrap_servers)
                connections = Connections(
                    tokens=await start(lambda: lasting(AIOKafkaProducer(**settings, **PRODUCER_SETTINGS))),
                    usage=await start(lambda: lasting(AIOKafkaProducer(**settings, **PRODUCER_SETTINGS))),
                    heartbeats=await start(
                        lambda: AIOKafkaProducer(**settings, **HEARTBEAT_PRODUCER_SETTINGS)
                    ),
                    decisions=await start(lambda: lasting(AIOKafkaProducer(**settings, **PRODUCER_SETTINGS))),
                    mailbox=await start(lambda: AIOKafkaConsumer(**settings, **BUSY_CONSUMER_SETTINGS)),
                    cancellations=await start(lambda: AIOKafkaConsumer(**settings, **CONSUMER_SETTINGS)),
                )
                if hands_over:
                    connections = replace(
                        connections,
                        handoffs=await start(
                            lambda: lasting(AIOKafkaProducer(**settings, **PRODUCER_SETTINGS))
                        ),
                        fleet=await start(lambda: AIOKafkaConsumer(**settings, **BUSY_CONSUMER_SETTINGS)),
                    )
                await _check_topics(connections, layout)
        except TimeoutError:
            raise KafkaUnavailableError(
                f"no answer from Kafka at {bootstrap_servers} within {timeout:g} s: is it running?"
            ) from None
        yield connections
    finally:
        for client in reversed(clients):
            await stop_client(client, _CLOSE_S)


async def start_client(make: Callable[[], C], bootstrap_servers: str) -> C:
    """A started client; tries for ever while nobody answers, so the caller sets a deadline."""
    said = False
    while True:
        client = make()
        try:
            await client.start()
            return client
        except KafkaError as error:
            await stop_client(client, _CLOSE_S)
            if not said:
                log.info("waiting for Kafka", extra={"bootstrap": bootstrap_servers, "error": repr(error)})
                said = True
        except BaseException:
            await stop_client(client, _CLOSE_S)
            raise
        await asyncio.sleep(_RETRY_S)


async def _check_topics(connections: Connections, layout: Layout) -> None:
    wanted = {spec.name: spec.partitions for spec in topics.topic_specs(layout)}
    errors = []
    for topic in _USED + (_USED_FOR_HANDOFFS if connections.handoffs else ()):
        try:
            found = len(await connections.tokens.partitions_for(topic))
        except KafkaError:
            found = 0
        if found != wanted[topic]:
            errors.append(f"{topic} has {found} partitions, by the settings it should have {wanted[topic]}")
    if errors:
        told = "; ".join(errors)
        raise KafkaUnavailableError(f"{told}: make them with `headrace topics`, or correct the layout")
    for producer, used in (
        (connections.usage, (topics.USAGE, topics.EVENTS, topics.SCHEMAS)),
        (connections.heartbeats, (topics.HEARTBEATS,)),
        (connections.decisions, (topics.DECISIONS,)),
        *(((connections.handoffs, (topics.DECODE,)),) if connections.handoffs else ()),
    ):
        for topic in used:
            await producer.partitions_for(topic)
