"""The Faust app of a service: one agent on one topic of raw records, no tables, no web."""

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import faust
from faust.tables.manager import TableManager
from faust.transport.drivers import aiokafka as driver

from schemas.config import CommonConfig
from schemas.fleet import BUSY_FETCH_WAIT_MS
from schemas.kafka_login import MECHANISM, login_of
from streams.assignment import SpreadAssignor

OnAssigned = Callable[[set[int]], Awaitable[None]]

# Members hear with their next heartbeat that others came or went.
_GROUP_HEARTBEAT_S = 0.3


class Fetch(NamedTuple):
    """When the broker answers a fetch: with so many bytes, or after so long."""

    min_bytes: int
    max_wait_ms: int


FETCH_SOON = Fetch(1, BUSY_FETCH_WAIT_MS)


def member_client_id(role: str, slot: int) -> str:
    """By which a process's member of its group can be told."""
    return f"{role}-{slot}"


class _ConsumerThread(driver.AIOKafkaConsumerThread):
    """Faust's own fetches for 1.5 s and deals partitions out in turn, and knows no settings for it."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_min_bytes, consumer._fetch_max_wait_ms = transport.fetch
        # One alone: aiokafka joins anew for each, with a list that is longer by one. Every such join begins
        # another rebalance, and several members that came together kept one another from ever ending one.
        consumer._partition_assignment_strategy = [SpreadAssignor]
        return consumer


class _Consumer(driver.Consumer):
    def _new_consumer_thread(self) -> Any:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)


class _Transport(driver.Transport):
    Consumer = _Consumer
    fetch = FETCH_SOON


class _NoTables(TableManager):
    """Faust's own waits a second for tables to be declared. There are none, and somebody waits for us."""

    async def on_start(self) -> None:
        if not self.should_stop:
            await self._update_channels()
            await self.recovery.start()


def _credentials(servers: str) -> Any:
    login = login_of(servers)
    if login is None:
        return None
    return faust.SASLCredentials(
        username=login.user,
        password=login.password,
        mechanism=MECHANISM,
        ssl_context=ssl.create_default_context() if login.tls else None,
    )


def build_faust_app(
    role: str,
    config: CommonConfig,
    datadir: Path,
    topic: str,
    agent: Callable[[Any], Awaitable[None]],
    on_assigned: OnAssigned,
    *,
    session_timeout_s: float,
    fetch: Fetch = FETCH_SOON,
    **settings: Any,
) -> Any:
    """`agent(stream)` is the role's consumer group of `topic`; `on_assigned` is told the partition numbers
    after each rebalance. `settings` are Faust's own."""
    app = faust.App(
        role,
        broker=[f"kafka://{server}" for server in config.kafka.split(",")],
        broker_credentials=_credentials(config.kafka),
        broker_client_id=member_client_id(role, config.slot),
        # Static membership: a restart within the session finds its partitions without a rebalance.
        consumer_group_instance_id=f"{role}-{config.slot}",
        broker_session_timeout=session_timeout_s,
        broker_heartbeat_interval=min(session_timeout_s / 5, _GROUP_HEARTBEAT_S),
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=8 << 20,
        # Neither a stop nor a rebalance waits for an agent that is stuck.
        stream_wait_empty=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        web_enabled=False,
        TableManager=_NoTables,
        datadir=datadir,
        **settings,
    )
    app.transport = _Transport(app.conf.broker_consumer, app, loop=app.loop)
    app.transport.fetch = fetch
    source = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
    app.agent(source, name=role)(agent)

    async def assigned(_app: Any, assigned: set[Any], **_: Any) -> None:
        await on_assigned({tp.partition for tp in assigned if tp.topic == topic})

    signal: Any = app.on_partitions_assigned
    signal.connect(assigned, weak=False)
    return app
