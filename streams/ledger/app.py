"""The ledger process's Kafka clients, its Faust app with one agent, and its command line."""

import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from schemas import topics
from schemas.fleet import CONSUMER_SETTINGS, HEARTBEAT_PRODUCER_SETTINGS, PRODUCER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.lasting_producer import lasting
from streams import command
from streams.faust_app import Fetch, OnAssigned, build_faust_app
from streams.ledger.config import ROLE, LedgerConfig
from streams.ledger.coordinator import ShardClients
from streams.ledger.results import ResultWriter
from streams.ledger.service import Kafka, LedgerService, OnBatch
from streams.ledger.sql_endpoint import SQL_THREADS
from streams.ledger.tenant_batches import bound_batches

# Heartbeats are fetched together: a lone record costs 0.6 ms, one in a batch 3 µs.
_HEARTBEAT_FETCH: dict[str, Any] = {"fetch_min_bytes": 1 << 20, "fetch_max_wait_ms": 100}
# So is usage, which waits for its insert anyway.
_USAGE_FETCH = Fetch(min_bytes=1 << 20, max_wait_ms=1_000)
_SESSION_TIMEOUT_S = 6.0
_COMMIT_S = 1.0


def make_kafka(config: LedgerConfig) -> Kafka:
    """The clients; needs a running loop."""
    bound_batches()

    def client(purpose: str) -> dict[str, Any]:
        return {**client_settings(config.kafka), "client_id": f"{ROLE}-{config.slot}-{purpose}"}

    def shard_clients(shard: int, committed: Callable[[str, int], Awaitable[Any]]) -> ShardClients:
        return ShardClients(
            sources=AIOKafkaConsumer(
                **client(f"sources-{shard}"), **CONSUMER_SETTINGS, isolation_level="read_committed"
            ),
            jobs=AIOKafkaConsumer(
                **client(f"jobs-{shard}"), **CONSUMER_SETTINGS, isolation_level="read_committed"
            ),
            results=AIOKafkaConsumer(
                **client(f"results-{shard}"), **CONSUMER_SETTINGS, isolation_level="read_committed"
            ),
            replies=AIOKafkaConsumer(**client(f"replies-{shard}"), **CONSUMER_SETTINGS),
            writer=ResultWriter(config.kafka, shard),
            partition=TopicPartition,
            committed=committed,
        )

    def faust_app(datadir: Path, on_batch: OnBatch, on_assigned: OnAssigned) -> Any:
        return make_faust_app(config, datadir, on_batch, on_assigned)

    return Kafka(
        producer=lasting(AIOKafkaProducer(**client("producer"), **PRODUCER_SETTINGS)),
        heartbeat_producer=AIOKafkaProducer(**client("heartbeats"), **HEARTBEAT_PRODUCER_SETTINGS),
        control=AIOKafkaConsumer(**client("control"), **CONSUMER_SETTINGS),
        heartbeats=AIOKafkaConsumer(**client("heartbeats"), **{**CONSUMER_SETTINGS, **_HEARTBEAT_FETCH}),
        usage=AIOKafkaConsumer(**client("usage"), **CONSUMER_SETTINGS),
        admin=AIOKafkaAdminClient(**client("admin")),
        partition=TopicPartition,
        faust_app=faust_app,
        shard_clients=shard_clients,
    )


def make_faust_app(config: LedgerConfig, datadir: Path, on_batch: OnBatch, on_assigned: OnAssigned) -> Any:
    """See `Kafka`. Offsets are committed behind what `on_batch` has returned for, and nothing else: what a
    stop or a rebalance finds not acked is read again."""

    async def ledger(stream: Any) -> None:
        # Not `take`: it acks what it gave out also where the body was cancelled or failed.
        async for events in stream.noack_take(config.insert_rows, within=config.insert_window_ms / 1000):
            await on_batch([event.message for event in events])
            for event in events:
                await stream.ack(event)

    return build_faust_app(
        ROLE,
        config,
        datadir,
        topics.USAGE,
        ledger,
        on_assigned,
        session_timeout_s=_SESSION_TIMEOUT_S,
        fetch=_USAGE_FETCH,
        broker_commit_interval=_COMMIT_S,
        # While an insert fails nothing is acked, for as long as that lasts: that is no livelock.
        broker_commit_livelock_soft_timeout=86_400.0,
        stream_processing_timeout=86_400.0,
    )


def main(argv: Sequence[str] = ()) -> int:
    """See `streams.command`."""
    status = command.main(ROLE, LedgerConfig, lambda config: LedgerService(config, make_kafka(config)), argv)
    if any(thread.name.startswith(SQL_THREADS) for thread in threading.enumerate()):
        # A query that still runs can only be waited for. All that counts is on disk by now.
        logging.shutdown()
        os._exit(status)
    return status
