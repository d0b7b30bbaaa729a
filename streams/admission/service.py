"""One admission process: what it starts, in which order, and how each part ends."""

import asyncio
import gc
import logging
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.clock import epoch_ms
from schemas.codec import default_codec
from schemas.fleet import HEARTBEAT_INTERVAL_S, publish_schemas
from schemas.records import Heartbeat, Tenant
from schemas.topic_check import check_topics
from streams.admission.config import ROLE, AdmissionConfig
from streams.admission.dispatcher import Dispatcher
from streams.admission.eviction import Evictions
from streams.admission.inbox import Inbox
from streams.admission.intake import Intake
from streams.admission.key_loader import KeyLoader
from streams.admission.load_figures import LoadFigures
from streams.admission.metrics import Metrics
from streams.admission.open_reservations import open_reservations_route
from streams.admission.pulse import keep_time, log_decisions, send_decisions
from streams.admission.usage_follower import UsageFollower
from streams.consumer import find_leaders
from streams.consumer_group import ConsumerGroup
from streams.control import ControlFollower
from streams.faust_app import member_client_id
from streams.heartbeats import beat, follow_heartbeats
from streams.http import bind, health_app
from streams.membership import Membership
from streams.parts import Parts, run_parts

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
# Full collections are for cycles that libraries leave: a few an hour.
_GC_THRESHOLDS = (10_000, 10, 50)
_LOOK_S = 0.02
_EVICT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Kafka:
    """The clients, not started; `Any` stands for types that carry no type information.

    `faust_app(datadir, on_record, on_assigned)` makes the app whose agent hands every message of
    inference.requests to `on_record`, and every assignment's partition numbers to `on_assigned`.
    """

    producer: Any
    heartbeat_producer: Any
    decision_producer: Any
    control: Any
    heartbeats: Any
    usage: Any
    keys: Any
    group: ConsumerGroup
    partition: Callable[[str, int], Any]
    faust_app: Callable[[Path, Callable[[Any], Awaitable[None]], Callable[[set[int]], Awaitable[None]]], Any]

    def clients(self) -> list[Any]:
        return [
            self.producer,
            self.heartbeat_producer,
            self.decision_producer,
            self.control,
            self.heartbeats,
            self.usage,
            self.keys,
            self.group,
        ]


class AdmissionService:
    """One process. `run` returns when it was asked to stop, and raises what ended it else."""

    def __init__(self, config: AdmissionConfig, kafka: Kafka) -> None:
        self.config = config
        self.kafka = kafka
        self.admission = config.admission(config.fallback_models())
        self.admission.restating.restate_wait_ms = config.restate_wait_ms
        self.metrics = Metrics()
        self.metrics.registry.register(LoadFigures(self.admission.overload))
        self._stopping = False
        self._control_read = False
        self._assigned = False
        self._shut = asyncio.Event()
        self.dispatcher = Dispatcher(
            kafka.producer,
            self.admission,
            self.metrics,
            epoch_ms,
            lambda: (config.slot, self.membership.epoch),
        )
        self.membership = Membership(
            ROLE, config.slot, self.admission.fleet, self._on_peer, self._on_fleet_change
        )
        self.control = ControlFollower(
            kafka.control,
            kafka.partition,
            self.membership,
            self._on_tenant,
            self.admission.fallback.put,
            on_spend=self.admission.budgets.put,
        )
        self.usage = UsageFollower(
            kafka.usage, kafka.partition, self.admission, self.dispatcher.put, epoch_ms
        )
        self.keys = KeyLoader(kafka.keys, kafka.partition, self.admission, self._on_keys_loaded, epoch_ms)
        self.inbox = Inbox()
        self.intake = Intake(
            self.admission,
            self.metrics,
            epoch_ms,
            self.control.catch_up_schemas,
            self.control.catch_up_tenants,
        )

    def not_ready(self) -> str | None:
        """Why requests are not served yet, or None."""
        if self._stopping:
            return "stopping"
        if not self._control_read:
            return "reading control topics"
        if not self._assigned:
            return "no partitions of inference.requests assigned yet"
        if not self.membership.heard_itself:
            return "own heartbeat has not come back yet"
        return None

    async def run(self, stop: asyncio.Event) -> None:
        await run_parts(self._start, stop, self._on_stopping)

    async def _start(self, parts: Parts) -> None:
        config, kafka, stack = self.config, self.kafka, parts.stack
        # Faust loads most of itself when the app is made: before anyone waits for our heartbeats.
        datadir = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-admission-"))
        app = kafka.faust_app(Path(datadir), self.inbox.put, self._on_assigned)
        # 1. HTTP first: whoever waits for us can ask why.
        sock = bind(config.http_host, config.http_port)
        address = f"http://{config.http_host}:{sock.getsockname()[1]}"
        told = open_reservations_route(self.admission.limits)
        parts.serve("http", sock, health_app(self.not_ready, self.metrics.registry, [told]))
        # 2. The broker. What is told by others is read up to now before anyone hears of us.
        async with asyncio.timeout(START_TIMEOUT_S):
            for client in kafka.clients():
                await parts.open(client.start, client.stop)
            await check_topics(kafka.control, topics.NEEDED[ROLE])
            await publish_schemas(kafka.producer, default_codec().schemas())
            await asyncio.gather(self.control.read_to_end(), *self._find_leaders())
            self._control_read = True
            # 3. This process's life has a name.
            await self.membership.join(kafka.producer, address)
        stack.push_async_callback(self.membership.leave, kafka.producer)
        if config.decision_log:
            # After the last decision is made, and before the producer stops.
            stack.push_async_callback(self._send_last_decisions)
        parts.spawn("dispatcher", self.dispatcher.run())
        stack.push_async_callback(self._drain)
        parts.spawn("control", self.control.run())
        parts.spawn("heartbeats", follow_heartbeats(kafka.heartbeats, kafka.partition, self.membership))
        parts.spawn("usage", self.usage.run())
        parts.spawn("keys", self.keys.run())
        parts.spawn("pulse", beat(kafka.heartbeat_producer, self._heartbeat))
        parts.spawn("clock", self._keep_time())
        parts.spawn("requests", self._serve_requests())
        parts.spawn("takeovers", self._open_partitions())
        parts.spawn("evictions", self._put_out_the_dead())
        if config.decision_log:
            decisions = log_decisions(kafka.decision_producer, self.admission, config.shards)
            parts.spawn("decisions", decisions)
        # 4. Requests come last: by now all that decides about them is known.
        async with asyncio.timeout(START_TIMEOUT_S):
            await parts.start_faust(app)
        # What waits is freed by its last reference, not by the collector, whose walks over 50,000 requests
        # take 0.15 ms of each that comes (measured) and 100 ms at a time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        gc.enable()

    def _find_leaders(self) -> list[Coroutine[Any, Any, None]]:
        """For what is asked between the group's assignment and the first decision."""
        kafka, at = self.kafka, self.kafka.partition
        return [
            find_leaders(kafka.heartbeats, at(topics.HEARTBEATS, 0)),
            find_leaders(kafka.usage, at(topics.USAGE, 0)),
            find_leaders(kafka.keys, at(topics.REQUESTS, 0), at(topics.IDEMPOTENCY, 0)),
        ]

    def _on_stopping(self) -> None:
        self._stopping = True

    def _heartbeat(self) -> Heartbeat:
        return self.membership.heartbeat(self.admission.partition_statuses())

    def _on_peer(self, heartbeat: Heartbeat) -> None:
        self.admission.peers.heard(heartbeat)
        if lost := self.admission.on_other_admission(heartbeat.partitions, epoch_ms()):
            log.warning("admission %d took over partitions %s", heartbeat.slot, lost)

    def _on_fleet_change(self) -> None:
        self.dispatcher.put(self.admission.fleet_changed(epoch_ms()))

    def _on_keys_loaded(self, partition: int) -> None:
        self.dispatcher.put(self.intake.look_again(partition))

    def _on_tenant(self, name: str, tenant: Tenant | None) -> None:
        self.admission.on_tenant(name, tenant, epoch_ms())

    async def _serve_requests(self) -> None:
        while True:
            for message in await self.inbox.take():
                headers = message.headers
                pairs = headers.items() if isinstance(headers, Mapping) else headers
                place = message.partition, message.offset
                self.dispatcher.put(await self.intake.on_record(*place, message.key, message.value, pairs))

    async def _on_assigned(self, numbers: set[int]) -> None:
        """The consumer group gave this process these partitions of inference.requests, and no others."""
        partitions = [self.kafka.partition(topics.REQUESTS, number) for number in numbers]
        # What lies below these was for whoever held the partitions before.
        async with asyncio.timeout(START_TIMEOUT_S):
            # Of the consumer that waits for nothing: behind a fetch that does, the answer would be late.
            ends = await self.kafka.keys.end_offsets(partitions) if partitions else {}
        self.admission.on_assigned({tp.partition: end for tp, end in ends.items()}, epoch_ms())
        self._shut.set()
        self.usage.assignment_changed()
        self.intake.assigned(numbers)
        self.keys.assignment_changed()
        self._assigned = bool(partitions)
        log.info("partitions assigned", extra={"partitions": sorted(numbers)})

    async def _keep_time(self) -> None:
        await keep_time(self.admission, self.dispatcher, self.metrics, epoch_ms, self.config.ack_deadline_s)

    async def _open_partitions(self) -> None:
        """Requests of a partition taken over wait until it is known what runs there."""
        while True:
            await self._shut.wait()
            self._shut.clear()
            while not self.admission.restating.all_open:
                await asyncio.sleep(_LOOK_S)
                opened = self.admission.restating.open_due(self.admission.fleet, epoch_ms())
                for each in opened:
                    self.metrics.takeover_seconds.observe(each.waited_ms / 1000)
                    self.dispatcher.put(self.intake.look_again(each.partition))
                if opened:
                    log.info("partitions opened", extra={"opened": [asdict(each) for each in opened]})

    async def _put_out_the_dead(self) -> None:
        """So that others get their partitions before their session ends."""
        evictions = Evictions(self.config.slot, self.admission.fleet)
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            for slot, epoch in evictions.due():
                try:
                    async with asyncio.timeout(_EVICT_TIMEOUT_S):
                        is_over = partial(evictions.is_over, slot, epoch)
                        if await self.kafka.group.put_out(member_client_id(ROLE, slot), is_over):
                            evictions.done(slot, epoch)
                except Exception as error:
                    log.warning("admission %d is gone, but may still be in the group: %r", slot, error)

    async def _send_last_decisions(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.stop_timeout_s):
                await send_decisions(self.kafka.decision_producer, self.admission, self.config.shards)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.config.stop_timeout_s):
                await self.dispatcher.drain()
        except TimeoutError:
            log.warning("stopped with sends that the broker has not acked")
