"""The admission process's Kafka clients, its Faust app with one agent, and its command line."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import faust
import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas import logs, topics
from schemas.config import ConfigError, describe, from_env
from schemas.fleet import CONSUMER_SETTINGS, HEARTBEAT_PRODUCER_SETTINGS, PRODUCER_SETTINGS
from streams.admission.config import AdmissionConfig
from streams.admission.followers import ROLE, SupersededError
from streams.admission.service import AdmissionService, Kafka

log = logging.getLogger("streams.admission")

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_SUPERSEDED = 3

# Heartbeats are fetched together: a lone record costs 0.6 ms, one in a batch 3 µs.
_HEARTBEAT_FETCH: dict[str, Any] = {"fetch_min_bytes": 1 << 20, "fetch_max_wait_ms": 50}
_DECISION_LINGER_MS = 100


def make_kafka(config: AdmissionConfig) -> Kafka:
    """The clients; needs a running loop."""

    def client(purpose: str) -> dict[str, Any]:
        return {"bootstrap_servers": config.kafka, "client_id": f"{ROLE}-{config.slot}-{purpose}"}

    decisions = {**PRODUCER_SETTINGS, "linger_ms": _DECISION_LINGER_MS}
    heartbeats = {**CONSUMER_SETTINGS, **_HEARTBEAT_FETCH}

    def faust_app(
        datadir: Path,
        on_record: Callable[[Any], Awaitable[None]],
        on_assigned: Callable[[list[int]], Awaitable[None]],
    ) -> Any:
        return make_faust_app(config, datadir, on_record, on_assigned)

    return Kafka(
        producer=AIOKafkaProducer(**client("requests"), **PRODUCER_SETTINGS),
        heartbeat_producer=AIOKafkaProducer(**client("heartbeats"), **HEARTBEAT_PRODUCER_SETTINGS),
        decision_producer=AIOKafkaProducer(**client("decisions"), **decisions),
        control=AIOKafkaConsumer(**client("control"), **CONSUMER_SETTINGS),
        heartbeats=AIOKafkaConsumer(**client("heartbeats"), **heartbeats),
        usage=AIOKafkaConsumer(**client("usage"), **CONSUMER_SETTINGS),
        partition=TopicPartition,
        faust_app=faust_app,
    )


def make_faust_app(
    config: AdmissionConfig,
    datadir: Path,
    on_record: Callable[[Any], Awaitable[None]],
    on_assigned: Callable[[list[int]], Awaitable[None]],
) -> Any:
    """See `Kafka`. `on_record` must not raise: an exception in an agent loses the record."""
    app = faust.App(
        ROLE,
        broker=[f"kafka://{server}" for server in config.kafka.split(",")],
        broker_client_id=f"{ROLE}-{config.slot}",
        # Static membership: a restart within the session finds its partitions without a rebalance.
        consumer_group_instance_id=f"{ROLE}-{config.slot}",
        broker_session_timeout=config.session_timeout_ms / 1000,
        broker_heartbeat_interval=config.session_timeout_ms / 5000,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=8 << 20,
        topic_disable_leader=True,
        topic_allow_declare=False,
        web_enabled=False,
        datadir=datadir,
    )
    requests = app.topic(
        topics.REQUESTS, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
    )

    async def admission(stream: Any) -> None:
        async for event in stream.events():
            await on_record(event.message)

    async def assigned(_app: Any, assigned: set[Any], **_: Any) -> None:
        await on_assigned([tp.partition for tp in assigned if tp.topic == topics.REQUESTS])

    app.agent(requests, name=ROLE)(admission)
    assignment: Any = app.on_partitions_assigned
    assignment.connect(assigned, weak=False)
    return app


async def serve(config: AdmissionConfig) -> None:
    """Runs until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await AdmissionService(config, make_kafka(config)).run(stop)


def main(argv: Sequence[str] = ()) -> int:
    """The exit status: 0 stopped, 1 failed, 2 wrong configuration, 3 a younger process has the slot."""
    parser = argparse.ArgumentParser(
        prog="python -m streams admission",
        epilog="settings:\n" + describe(AdmissionConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--validate", action="store_true", help="check the configuration and exit")
    arguments = parser.parse_args(list(argv))
    try:
        config = from_env(AdmissionConfig, os.environ)
    except ConfigError as error:
        print(f"{ROLE}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if arguments.validate:
        print(f"{ROLE}: slot {config.slot}, {config.shards} shards, brokers {config.kafka}")
        return 0
    logs.configure(ROLE, config.slot, config.log_level)
    # Faust says at INFO what each of its many parts does.
    for noisy in ("faust", "mode", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # By policy, not by runner: Faust's consumer thread makes a loop of its own, which is to be fast too.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(serve(config))
    except SupersededError as error:
        log.error("stopped: %s", error)
        return EXIT_SUPERSEDED
    except Exception as error:
        log.exception("failed: %s", error)
        return EXIT_FAILED
    return 0
