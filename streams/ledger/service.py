"""One ledger process: what it starts, in which order, and how each part ends."""

import asyncio
import functools
import itertools
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.catalog import Catalog
from schemas.codec import default_codec
from schemas.fleet import FleetView, publish_schemas
from schemas.models import LoadedModel, load_models
from schemas.object_store import open_store
from schemas.offered_models import OfferedModels
from schemas.records import Heartbeat, Tenant
from schemas.topic_check import check_topics
from streams.control import ControlFollower
from streams.heartbeats import beat, follow_heartbeats
from streams.http import bind, health_app
from streams.ledger.archiver import Archiver, keep_archived
from streams.ledger.clickhouse import ReadOnlyEngine, chdb_folder
from streams.ledger.config import ROLE, LedgerConfig
from streams.ledger.coordinator import ShardClients, ShardCoordinator, ShardSettings
from streams.ledger.folder_lock import FolderLock
from streams.ledger.job_store import JobStore
from streams.ledger.lag import watch_lag
from streams.ledger.metrics import REGISTRY
from streams.ledger.prices import PriceKeeper, PriceRow
from streams.ledger.results import GROUP
from streams.ledger.shards import Shards
from streams.ledger.spend_tables import SpendTables
from streams.ledger.spend_teller import Scope, SpendTeller
from streams.ledger.spending import Spending
from streams.ledger.sql_endpoint import SqlEndpoint
from streams.ledger.store_opening import open_tables
from streams.ledger.sweeper import keep_swept
from streams.ledger.usage_intake import UsageIntake
from streams.ledger.usage_source import TopicReader, UsageArchive
from streams.membership import Membership
from streams.parts import Parts, run_parts

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
_LOCK_POLL_S = 0.2
# A shard that begins anew in this process must not write to what its last life may still be writing to.
_LIVES_BITS = 20

OnBatch = Callable[[Sequence[Any]], Awaitable[None]]
OnAssigned = Callable[[set[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kafka:
    """The clients, not started; `Any` stands for types that carry no type information.

    `faust_app(datadir, on_batch, on_assigned)` makes the app whose agent hands batches of messages of
    inference.usage to `on_batch`, and acks them only when that returns.
    """

    producer: Any
    heartbeat_producer: Any
    control: Any
    heartbeats: Any
    usage: Any
    admin: Any
    partition: Callable[[str, int], Any]
    faust_app: Callable[[Path, OnBatch, OnAssigned], Any]
    shard_clients: Callable[[int, Callable[[str, int], Awaitable[Any]]], ShardClients]

    def clients(self) -> list[Any]:
        return [self.producer, self.heartbeat_producer, self.control, self.heartbeats, self.usage]


class LedgerService:
    """One process. `run` returns when it was asked to stop, and raises what ended it else."""

    def __init__(self, config: LedgerConfig, kafka: Kafka) -> None:
        self.config, self.kafka = config, kafka
        self.membership = Membership(ROLE, config.slot, FleetView())
        self._shards = Shards(config.shards, self._make_shard)
        self._prices = PriceKeeper(self._store_prices)
        self._spending = Spending()
        self.control = ControlFollower(
            kafka.control,
            kafka.partition,
            self.membership,
            self._on_tenant,
            lambda name, model: self._offered.tell(name, model),
            self._prices.tell,
            self._spending.put_spend,
        )
        self._offered = OfferedModels(config.models_dir, {})
        self._waits_for: str | None = "starting"
        self._usage_partitions: set[int] = set()
        self._assigned = False
        self._intake: UsageIntake | None = None
        self._lives = itertools.count()

    def not_ready(self) -> str | None:
        """Why the ledger does not work yet, or None."""
        if self._waits_for is not None:
            return self._waits_for
        if not self._assigned:
            return "no partitions of inference.usage assigned yet"
        if not self.membership.heard_itself:
            return "own heartbeat has not come back yet"
        if self._intake is not None and (since := self._intake.failing_since) is not None:
            return f"usage rows cannot be stored since {time.monotonic() - since:.0f} s"
        return None

    async def run(self, stop: asyncio.Event) -> None:
        # It may also be stopped while it starts: for example a standby that is no longer needed.
        await run_parts(self._start, stop, self._on_stopping)

    async def _start(self, parts: Parts) -> None:
        config, kafka, stack = self.config, self.kafka, parts.stack
        # 1. HTTP first: whoever waits for us can ask why.
        sock = bind(config.http_host, config.http_port)
        address = f"http://{config.http_host}:{sock.getsockname()[1]}"
        parts.serve("http", sock, health_app(self.not_ready, REGISTRY))
        # 2. The tables. One process at a time has an embedded folder; the others wait here.
        folder = chdb_folder(config.dsn())
        if folder is not None:
            await self._lock(folder, parts)
        self._waits_for = "opening ClickHouse and loading models"
        models = asyncio.create_task(asyncio.to_thread(self._load_models))
        store = await open_tables(config.dsn(), config.ddl_dir, self._wait_for)
        stack.callback(store.close)
        self._waits_for = "loading models"
        self._offered = OfferedModels(config.models_dir, await models)
        if folder is not None:
            await self._serve_sql(folder, parts)
        # 3. The broker. What is told by others is read up to now before anyone hears of us.
        self._waits_for = "connecting to Kafka"
        async with asyncio.timeout(START_TIMEOUT_S):
            for client in kafka.clients():
                await parts.open(client.start, client.stop)
            await parts.open(kafka.admin.start, kafka.admin.close)
            await check_topics(kafka.control, topics.NEEDED[ROLE])
            await publish_schemas(kafka.producer, default_codec().schemas())
            await self.control.read_to_end()
            await self._offered.catch_up()
            # 4. This process's life has a name.
            await self.membership.join(kafka.producer, address)
        stack.push_async_callback(self.membership.leave, kafka.producer)
        parts.spawn("control", self.control.run())
        parts.spawn("models", self._offered.run())
        parts.spawn("heartbeats", follow_heartbeats(kafka.heartbeats, kafka.partition, self.membership))
        parts.spawn("pulse", beat(kafka.heartbeat_producer, self._heartbeat))
        # 5. Usage, and with its partitions the batch shards.
        intake = self._intake = UsageIntake(
            store, kafka.producer, self.control.catch_up_schemas, self._spending.touched
        )
        stack.callback(intake.close)
        await self._prices.settle()
        parts.spawn("prices", self._prices.run())
        self._tell_spend(parts)
        parts.spawn("shards", self._shards.run())
        # Whoever has shard 0 sweeps for all.
        objects = open_store(config.object_store)
        parts.spawn("sweeper", keep_swept(objects, config.sweep_s, lambda: self._shards.holds(0)))
        # Each archives the usage that it bills.
        archiver = Archiver(
            UsageArchive(objects),
            TopicReader(kafka.usage, kafka.partition, topics.USAGE),
            self.control.catch_up_schemas,
        )
        parts.spawn("archiver", keep_archived(archiver, lambda: self._usage_partitions, config.archive_s))
        lag = watch_lag(kafka.control, self._usage_tps, self._committed_usage, intake.stored)
        parts.spawn("lag", lag)
        datadir = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-ledger-"))
        app = kafka.faust_app(Path(datadir), intake.take, self._on_assigned)
        async with asyncio.timeout(START_TIMEOUT_S):
            await parts.start_faust(app)
        self._waits_for = None

    async def _store_prices(self, rows: Sequence[PriceRow]) -> None:
        assert self._intake is not None, "prices are stored once the tables are open"
        await self._intake.take_prices(rows)
        self._spending.touched_all()

    def _tell_spend(self, parts: Parts) -> None:
        tables = SpendTables(self.config.dsn())
        scope = Scope(self._tells_spend_of, self._shares_usage_of)
        teller = SpendTeller(self._spending, tables, self.kafka.producer, scope, self.config.spend_s)
        parts.stack.callback(teller.close)
        parts.spawn("spend", teller.run())

    def _tells_spend_of(self, tenant: str) -> bool:
        return self._shards.holds(topics.tenant_shard(tenant, self.config.shards))

    def _shares_usage_of(self, tenant: str) -> bool:
        shard = topics.tenant_shard(tenant, self.config.shards)
        return not self._usage_partitions.issuperset(topics.slot_partitions(shard))

    def _on_tenant(self, name: str, tenant: Tenant | None) -> None:
        self._spending.put_tenant(name, tenant)
        self._shards.put_tenant(name, tenant)

    def _heartbeat(self) -> Heartbeat:
        return self.membership.heartbeat(coordinator_shards=self._shards.running())

    def _on_stopping(self) -> None:
        self._wait_for("stopping")

    def _wait_for(self, what: str) -> None:
        self._waits_for = what

    async def _lock(self, folder: Path, parts: Parts) -> None:
        lock = FolderLock(folder)
        told = False
        while (holder := lock.try_acquire(self.config.slot)) is not None:
            self._waits_for = (
                f"standby: {folder} is held by the ledger of slot {holder.get('slot', '?')}, "
                f"pid {holder.get('pid', '?')}, since {holder.get('since', '?')}"
            )
            if not told:
                log.warning(self._waits_for)
                told = True
            await asyncio.sleep(_LOCK_POLL_S)
        parts.stack.callback(lock.release)

    def _load_models(self) -> dict[str, LoadedModel]:
        return load_models(Catalog.load(self.config.models_dir), self.config.model_ids())

    async def _serve_sql(self, folder: Path, parts: Parts) -> None:
        config = self.config
        engine = await asyncio.to_thread(ReadOnlyEngine, folder)
        endpoint = SqlEndpoint(engine, config.query_limits(), config.sql_concurrent, config.http_host)
        sock = bind(config.http_host, config.sql_port)
        log.info("read-only SQL", extra={"port": sock.getsockname()[1]})
        parts.serve("sql", sock, endpoint.app)
        parts.stack.callback(endpoint.close)

    @functools.cached_property
    def _job_store(self) -> JobStore:
        return JobStore(open_store(self.config.object_store))

    def _make_shard(self, shard: int, tenants: Callable[[], dict[str, Tenant]]) -> ShardCoordinator:
        config = self.config
        settings = ShardSettings(
            shard=shard,
            shards=config.shards,
            slot=config.slot,
            epoch=self.membership.epoch,
            end_ms=config.batch_end_ms,
            window=config.batch_window,
            prefix_order=config.batch_prefix_order,
            part_epoch=(self.membership.epoch << _LIVES_BITS) + next(self._lives),
        )
        return ShardCoordinator(
            settings,
            self.kafka.shard_clients(shard, self._committed),
            self.kafka.producer,
            self._offered.models,
            self.membership.view,
            tenants,
            self._job_store,
        )

    async def _committed(self, topic: str, partition: int) -> Any:
        tp = self.kafka.partition(topic, partition)
        found = await self.kafka.admin.list_consumer_group_offsets(GROUP, partitions=[tp])
        value = found.get(tp)
        return None if value is None or value.offset < 0 else (value.offset, value.metadata or "")

    async def _committed_usage(self, tps: list[Any]) -> dict[Any, int]:
        found = await self.kafka.admin.list_consumer_group_offsets(ROLE, partitions=tps)
        return {tp: max(0, value.offset) for tp, value in found.items()}

    def _usage_tps(self) -> list[Any]:
        return [self.kafka.partition(topics.USAGE, p) for p in self._usage_partitions]

    async def _on_assigned(self, partitions: set[int]) -> None:
        self._usage_partitions = partitions
        self._assigned = bool(partitions)
        self._shards.hold(partitions)
        self._spending.touched_all()
        log.info("partitions assigned", extra={"partitions": sorted(partitions)})
