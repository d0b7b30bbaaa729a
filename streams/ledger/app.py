"""The ledger process's Kafka clients, its Faust app with one agent, and its command line."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import faust
import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from schemas import logs, topics
from schemas.config import ConfigError, describe, from_env
from schemas.fleet import CONSUMER_SETTINGS, HEARTBEAT_PRODUCER_SETTINGS, PRODUCER_SETTINGS
from streams.ledger.config import LedgerConfig
from streams.ledger.coordinator import ShardClients
from streams.ledger.followers import ROLE, SupersededError
from streams.ledger.results import ResultWriter
from streams.ledger.service import Kafka, LedgerService, OnAssigned, OnBatch
from streams.ledger.sql_endpoint import SQL_THREADS

log = logging.getLogger("streams.ledger")

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_SUPERSEDED = 3

# Heartbeats are fetched together: a lone record costs 0.6 ms, one in a batch 3 µs.
_HEARTBEAT_FETCH: dict[str, Any] = {"fetch_min_bytes": 1 << 20, "fetch_max_wait_ms": 100}
_SESSION_TIMEOUT_S = 6.0
_COMMIT_S = 1.0


def make_kafka(config: LedgerConfig) -> Kafka:
    """The clients; needs a running loop."""

    def client(purpose: str) -> dict[str, Any]:
        return {"bootstrap_servers": config.kafka, "client_id": f"{ROLE}-{config.slot}-{purpose}"}

    def shard_clients(shard: int, committed: Callable[[str, int], Awaitable[Any]]) -> ShardClients:
        return ShardClients(
            sources=AIOKafkaConsumer(
                **client(f"sources-{shard}"), **CONSUMER_SETTINGS, isolation_level="read_committed"
            ),
            replies=AIOKafkaConsumer(**client(f"replies-{shard}"), **CONSUMER_SETTINGS),
            writer=ResultWriter(config.kafka, shard),
            partition=TopicPartition,
            committed=committed,
        )

    def faust_app(datadir: Path, on_batch: OnBatch, on_assigned: OnAssigned) -> Any:
        return make_faust_app(config, datadir, on_batch, on_assigned)

    return Kafka(
        producer=AIOKafkaProducer(**client("producer"), **PRODUCER_SETTINGS),
        heartbeat_producer=AIOKafkaProducer(**client("heartbeats"), **HEARTBEAT_PRODUCER_SETTINGS),
        control=AIOKafkaConsumer(**client("control"), **CONSUMER_SETTINGS),
        heartbeats=AIOKafkaConsumer(**client("heartbeats"), **{**CONSUMER_SETTINGS, **_HEARTBEAT_FETCH}),
        admin=AIOKafkaAdminClient(**client("admin")),
        partition=TopicPartition,
        faust_app=faust_app,
        shard_clients=shard_clients,
    )


def make_faust_app(config: LedgerConfig, datadir: Path, on_batch: OnBatch, on_assigned: OnAssigned) -> Any:
    """See `Kafka`. Offsets are committed behind what `on_batch` has returned for, and nothing else."""
    app = faust.App(
        ROLE,
        broker=[f"kafka://{server}" for server in config.kafka.split(",")],
        broker_client_id=f"{ROLE}-{config.slot}",
        # Static membership: a restart within the session finds its partitions without a rebalance.
        consumer_group_instance_id=f"{ROLE}-{config.slot}",
        broker_session_timeout=_SESSION_TIMEOUT_S,
        broker_heartbeat_interval=_SESSION_TIMEOUT_S / 5,
        broker_commit_interval=_COMMIT_S,
        # While an insert fails nothing is acked, for as long as that lasts: that is no livelock.
        broker_commit_livelock_soft_timeout=86_400.0,
        stream_processing_timeout=86_400.0,
        # Neither a stop nor a rebalance waits for a failing insert: what was not acked is read again.
        stream_wait_empty=False,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=8 << 20,
        topic_disable_leader=True,
        topic_allow_declare=False,
        web_enabled=False,
        datadir=datadir,
    )
    usage = app.topic(
        topics.USAGE, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
    )

    async def ledger(stream: Any) -> None:
        # Not `take`: it acks what it gave out also where the body was cancelled or failed.
        async for events in stream.noack_take(config.insert_rows, within=config.insert_window_ms / 1000):
            await on_batch([event.message for event in events])
            for event in events:
                await stream.ack(event)

    async def assigned(_app: Any, assigned: set[Any], **_: Any) -> None:
        await on_assigned({tp.partition for tp in assigned if tp.topic == topics.USAGE})

    app.agent(usage, name=ROLE)(ledger)
    assignment: Any = app.on_partitions_assigned
    assignment.connect(assigned, weak=False)
    return app


async def serve(config: LedgerConfig) -> None:
    """Runs until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await LedgerService(config, make_kafka(config)).run(stop)


def main(argv: Sequence[str] = ()) -> int:
    """The exit status: 0 stopped, 1 failed, 2 wrong configuration, 3 a younger process has the slot."""
    parser = argparse.ArgumentParser(
        prog="python -m streams ledger",
        epilog="settings:\n" + describe(LedgerConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--validate", action="store_true", help="check the configuration and exit")
    arguments = parser.parse_args(list(argv))
    try:
        config = from_env(LedgerConfig, os.environ)
    except ConfigError as error:
        print(f"{ROLE}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if arguments.validate:
        print(f"{ROLE}: slot {config.slot}, {config.shards} shards, brokers {config.kafka}")
        return 0
    logs.configure(ROLE, config.slot, config.log_level)
    # At INFO they tell of every part that starts or stops.
    for noisy in ("faust", "mode", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # By policy, not by runner: Faust's consumer thread makes a loop of its own, which is to be fast too.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    status = 0
    try:
        asyncio.run(serve(config))
    except SupersededError as error:
        log.error("stopped: %s", error)
        status = EXIT_SUPERSEDED
    except Exception as error:
        log.exception("failed: %s", error)
        status = EXIT_FAILED
    if any(thread.name.startswith(SQL_THREADS) for thread in threading.enumerate()):
        # A query that still runs can only be waited for. All that counts is on disk by now.
        logging.shutdown()
        os._exit(status)
    return status
