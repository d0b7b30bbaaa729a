"""The Faust app of a service: one agent on one topic of raw records, no tables, no web."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import faust
from faust.tables.manager import TableManager
from faust.transport.drivers import aiokafka as driver

from schemas.config import CommonConfig
from schemas.fleet import BUSY_FETCH_WAIT_MS

OnAssigned = Callable[[set[int]], Awaitable[None]]


class _ConsumerThread(driver.AIOKafkaConsumerThread):
    """Faust's own fetches for 1.5 s, and knows no setting for it."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = BUSY_FETCH_WAIT_MS
        return consumer


class _Consumer(driver.Consumer):
    def _new_consumer_thread(self) -> Any:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)


class _Transport(driver.Transport):
    Consumer = _Consumer


class _NoTables(TableManager):
    """Faust's own waits a second for tables to be declared. There are none, and somebody waits for us."""

    async def on_start(self) -> None:
        if not self.should_stop:
            await self._update_channels()
            await self.recovery.start()


def build_faust_app(
    role: str,
    config: CommonConfig,
    datadir: Path,
    topic: str,
    agent: Callable[[Any], Awaitable[None]],
    on_assigned: OnAssigned,
    *,
    session_timeout_s: float,
    **settings: Any,
) -> Any:
    """`agent(stream)` is the role's consumer group of `topic`; `on_assigned` is told the partition numbers
    after each rebalance. `settings` are Faust's own."""
    app = faust.App(
        role,
        broker=[f"kafka://{server}" for server in config.kafka.split(",")],
        broker_client_id=f"{role}-{config.slot}",
        # Static membership: a restart within the session finds its partitions without a rebalance.
        consumer_group_instance_id=f"{role}-{config.slot}",
        broker_session_timeout=session_timeout_s,
        broker_heartbeat_interval=session_timeout_s / 5,
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
    source = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
    app.agent(source, name=role)(agent)

    async def assigned(_app: Any, assigned: set[Any], **_: Any) -> None:
        await on_assigned({tp.partition for tp in assigned if tp.topic == topic})

    signal: Any = app.on_partitions_assigned
    signal.connect(assigned, weak=False)
    return app
