"""The Faust app of a service: one agent on one topic of raw records, no tables, no web."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import faust
from faust.tables.manager import TableManager
from faust.transport.drivers import aiokafka as driver
from faust.types.tuples import ConsumerMessage

from schemas.config import CommonConfig
from schemas.fleet import BUSY_FETCH_WAIT_MS
from schemas.kafka_login import MECHANISM, login_of
from streams.assignment import SpreadAssignor

OnAssigned = Callable[[set[int]], Awaitable[None]]

# Members hear with their next heartbeat that others came or went.
_GROUP_HEARTBEAT_S = 0.3
# What a fetch brought is dealt out by so many records of each partition in turn.
_MAX_TOGETHER = 16
# So that as many records lie between Faust and the agent as of its own 4,096 messages.
_BUFFER = 4_096 // _MAX_TOGETHER


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


class _Together(ConsumerMessage):
    """Records of one partition as one message: Faust spends 0.4 ms on each message, whatever is in it.

    It stands for the last of `messages`, whose offset it has.
    """

    __slots__ = ("messages",)


class _ConsumerTogether(_Consumer):
    async def _getmany(self, active_partitions: Any, timeout: float) -> dict[Any, list[Any]]:
        fetched = await super()._getmany(active_partitions, timeout)
        return {
            tp: [records[i : i + _MAX_TOGETHER] for i in range(0, len(records), _MAX_TOGETHER)]
            for tp, records in fetched.items()
        }

    def _to_message(self, tp: Any, record: Any) -> Any:
        read, to_message = self._read_offset[tp], super()._to_message
        # What lies below was read before and comes once more: Faust drops it, if all of it does.
        messages = [to_message(tp, each) for each in record if read is None or each.offset >= read]
        messages = messages or [to_message(tp, record[-1])]
        together: Any = _Together.from_message(messages[-1], tp)
        together.generation_id, together.messages = messages[-1].generation_id, messages
        # Offsets between two records hold none, and are committed over. So would be all before the last.
        offsets = [each.offset for each in messages]
        for before, after in pairwise(offsets if read is None else [read, *offsets]):
            if after > before + 1:
                self._gap[tp].addi(before + 1, after)
        self._read_offset[tp] = together.offset - 1 if read is None else max(read, together.offset - 1)
        return together


async def together(stream: Any) -> AsyncIterator[list[Any]]:
    """The messages of an app's stream with `records_together`. They count as processed when the next ones are
    asked for."""
    async for event in stream.events():
        messages = event.message.messages
        yield messages
        # Faust acks the last, and commits up to the first that is not acked.
        for message in messages[:-1]:
            stream.app.consumer.ack(message)


class _Transport(driver.Transport):
    Consumer = _Consumer
    fetch = FETCH_SOON


class _TransportTogether(_Transport):
    Consumer = _ConsumerTogether


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
    records_together: bool = False,
    **settings: Any,
) -> Any:
    """`agent(stream)` is the role's consumer group of `topic`; `on_assigned` is told the partition numbers
    after each rebalance. With `records_together` the stream is for `together`. `settings` are Faust's own."""
    if records_together:
        settings["stream_buffer_maxsize"] = _BUFFER
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
    transport = _TransportTogether if records_together else _Transport
    app.transport = transport(app.conf.broker_consumer, app, loop=app.loop)
    app.transport.fetch = fetch
    source = app.topic(topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")
    app.agent(source, name=role)(agent)

    async def assigned(_app: Any, assigned: set[Any], **_: Any) -> None:
        await on_assigned({tp.partition for tp in assigned if tp.topic == topic})

    signal: Any = app.on_partitions_assigned
    signal.connect(assigned, weak=False)
    return app
