"""The admission process's Kafka clients, its Faust app with one agent, and its command line."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas import topics
from schemas.fleet import (
    BUSY_CONSUMER_SETTINGS,
    CONSUMER_SETTINGS,
    HEARTBEAT_PRODUCER_SETTINGS,
    PRODUCER_SETTINGS,
)
from schemas.kafka_login import client_settings
from schemas.lasting_producer import lasting
from streams import command
from streams.admission.config import ROLE, AdmissionConfig
from streams.admission.service import AdmissionService, Kafka
from streams.consumer_group import ConsumerGroup
from streams.faust_app import OnAssigned, build_faust_app, together

# Heartbeats are fetched together: a lone record costs 0.6 ms, one in a batch 3 µs.
_HEARTBEAT_FETCH: dict[str, Any] = {"fetch_min_bytes": 1 << 20, "fetch_max_wait_ms": 50}
# A decision has about 700 bytes.
_DECISION_BATCH_BYTES = 256 << 10


def make_kafka(config: AdmissionConfig) -> Kafka:
    """The clients; needs a running loop."""

    def client(purpose: str) -> dict[str, Any]:
        return {**client_settings(config.kafka), "client_id": f"{ROLE}-{config.slot}-{purpose}"}

    decisions = {**PRODUCER_SETTINGS, "max_batch_size": _DECISION_BATCH_BYTES}
    heartbeats = {**CONSUMER_SETTINGS, **_HEARTBEAT_FETCH}

    def faust_app(datadir: Path, on_record: Callable[[Any], Awaitable[None]], on_assigned: OnAssigned) -> Any:
        return make_faust_app(config, datadir, on_record, on_assigned)

    return Kafka(
        producer=lasting(AIOKafkaProducer(**client("requests"), **PRODUCER_SETTINGS)),
        heartbeat_producer=AIOKafkaProducer(**client("heartbeats"), **HEARTBEAT_PRODUCER_SETTINGS),
        decision_producer=lasting(AIOKafkaProducer(**client("decisions"), **decisions)),
        control=AIOKafkaConsumer(**client("control"), **CONSUMER_SETTINGS),
        heartbeats=AIOKafkaConsumer(**client("heartbeats"), **heartbeats),
        usage=AIOKafkaConsumer(**client("usage"), **BUSY_CONSUMER_SETTINGS),
        keys=AIOKafkaConsumer(**client("keys"), **CONSUMER_SETTINGS),
        group=ConsumerGroup(ROLE, config.kafka, client("group")["client_id"]),
        partition=TopicPartition,
        faust_app=faust_app,
    )


def make_faust_app(
    config: AdmissionConfig,
    datadir: Path,
    on_record: Callable[[Any], Awaitable[None]],
    on_assigned: OnAssigned,
) -> Any:
    """See `Kafka`. `on_record` must not raise: an exception in an agent loses the record."""

    async def admission(stream: Any) -> None:
        async for messages in together(stream):
            for message in messages:
                await on_record(message)

    session_timeout_s = config.session_timeout_ms / 1000
    return build_faust_app(
        ROLE,
        config,
        datadir,
        topics.REQUESTS,
        admission,
        on_assigned,
        session_timeout_s=session_timeout_s,
        records_together=True,
    )


def main(argv: Sequence[str] = ()) -> int:
    """See `streams.command`."""
    return command.main(
        ROLE, AdmissionConfig, lambda config: AdmissionService(config, make_kafka(config)), argv
    )
