"""A gateway's life: start, join, serve, drain, leave."""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Coroutine
from typing import Any

from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError

from gateway.config import GatewayConfig
from gateway.http_server import HttpServer, listen
from gateway.log_scans import LogScans
from gateway.outbox import Outbox
from gateway.own_streams import OwnStreams
from gateway.owned_request import OwnedRequest
from gateway.owner import Owner, reply_partitions
from gateway.reply_offsets import ReplyOffsets
from gateway.serving import Serving
from gateway.succession import Succession
from gateway.token_log import TokenLog
from schemas import topics
from schemas.api.errors import ApiError
from schemas.catalog import Catalog
from schemas.clock import epoch_ms
from schemas.codec import default_codec, encode
from schemas.fleet import HEARTBEAT_INTERVAL_S, join, publish_schemas
from schemas.models import load_models
from schemas.offered_models import OfferedModels
from schemas.records import Cancellation, Duplicate, Heartbeat, Left, Tokens
from schemas.stream_state import ReplyRecord
from schemas.topic_check import MissingTopicsError

log = logging.getLogger(__name__)

ROLE = "gateway"
_LEAVE_S = 5.0
_AWAKE_S = 5.0


# A record of tokens is hundreds of small objects that live for a moment and are in no cycle.
_GC_THRESHOLDS = (20_000, 20, 50)


class SupersededError(RuntimeError):
    """Another process has joined in this slot."""


class KafkaUnavailableError(RuntimeError):
    """Kafka did not answer, or its topics are not there."""


class Gateway:
    """One gateway process. `port` is the one it serves on, from the beginning."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.serving = Serving(config, self._catch_up_tenants)
        self._socket = listen(config)
        self.port: int = self._socket.getsockname()[1]
        self._log = TokenLog(
            config.kafka,
            config.slot,
            self.serving.view,
            self.serving.tenants,
            lambda name, model: self.serving.offered.tell(name, model),
            lambda topic: self.serving.metrics.undecodable.labels(topic).inc(),
        )
        self._offsets = ReplyOffsets(config.kafka, config.slot)
        self._succession: Succession | None = None
        self._own: OwnStreams | None = None
        self._awakening: asyncio.Task[None] | None = None
        self.serving.reply_offset = self._log.reply_offset
        self._server = HttpServer(self.serving)

    async def _catch_up_tenants(self) -> None:
        await self._log.catch_up_tenants()

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains and leaves.

        Raises SupersededError, KafkaUnavailableError, LogTruncatedError, CatalogError, ValueError (a
        broken tokenizer): the process should end and be started anew.
        """
        http = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        try:
            await self._run(stop, http)
        finally:
            self._server.should_exit = True
            await http
            self.serving.tokenizing.shutdown(wait=False, cancel_futures=True)

    async def _run(self, stop: asyncio.Event, http: asyncio.Task[None]) -> None:
        config, serving = self.config, self.serving
        started = asyncio.create_task(self._start())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({started, stopped, http}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.gather(started, return_exceptions=True)
            await self._close()
            return
        try:
            nonce = started.result()
            work = [asyncio.create_task(c) for c in self._work(nonce)]
            try:
                await asyncio.wait({*work, stopped, http}, return_when=asyncio.FIRST_COMPLETED)
                for task in work:
                    if task.done():
                        task.result()
                await self._drain(config.drain_s)
            except Exception:
                await self._give_up()
                raise
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
            await self._leave()
        finally:
            stopped.cancel()
            serving.draining = True
            await self._close()

    async def _start(self) -> bytes:
        """Joins; returns the nonce. Raises KafkaUnavailableError, CatalogError, ValueError, OSError."""
        config, serving = self.config, self.serving
        serving.files.open()
        catalog = Catalog.load(config.models_dir)
        models = await asyncio.to_thread(load_models, catalog, config.model_ids())
        serving.offered = OfferedModels(config.models_dir, models)
        serving.models_loaded_at = int(time.time())
        serving.outbox = Outbox(config.kafka, self._on_sent)
        clock = serving.view.clock
        serving.scans = LogScans(
            config.kafka, self._log.decode, lambda: clock.now_ms, config.max_scans, config.kept_bytes
        )
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await serving.outbox.start()
                # 1. Where to read before Join: answers to this life lie behind it, and so does what the last
                #    life of this slot left open.
                await self._log.start(await self._offsets.start())
                # 2. Nothing of ours is written before its schema.
                await publish_schemas(serving.outbox.requests, default_codec().schemas())
                # 3. From this record on the slot is ours.
                address = f"{config.http_host}:{self.port}"
                epoch, nonce = await join(serving.outbox.requests, ROLE, config.slot, address)
        except MissingTopicsError as e:
            raise KafkaUnavailableError(str(e)) from None
        except (TimeoutError, KafkaError) as e:
            raise KafkaUnavailableError(
                f"Kafka at {config.kafka} did not serve this gateway within {config.start_timeout_s:g} s: "
                f"{e!r}. Is it running?"
            ) from e
        await serving.offered.catch_up()
        serving.view.watch_as(ROLE, config.slot, epoch)
        kept_ms = int(config.succession_s * 1000)
        serving.owner = Owner(config.slot, epoch, config.shards, config.cancel_timeout_ms, kept_ms)
        serving.owner.position = self._log.reply_offset
        serving.owner.on_over = self._on_over
        self._succession = Succession(
            config,
            serving.owner,
            serving.view,
            serving.scans,
            serving.outbox,
            self._log.decode,
            self._offsets,
            self._log.reply_offset,
            self._log.at_reply_end,
        )
        positions = {p: self._log.reply_offset(p) for p in reply_partitions(config.slot)}
        self._own = serving.scans.own = OwnStreams(serving.owner, positions)
        self._log.on_each = self._on_each
        serving.joined = True
        # Models and templates stay for ever: the collector need not walk them.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        if not config.stream_secret:
            log.warning("HEADRACE_STREAM_SECRET is not set: streams can be read again at this gateway alone")
        log.info("joined", extra={"epoch": epoch, "port": self.port})
        return nonce

    def _work(self, nonce: bytes) -> list[Coroutine[Any, Any, None]]:
        assert self._succession is not None
        return [
            self._log.follow_control(),
            self.serving.offered.run(),
            self._log.follow_heartbeats(),
            self._log.follow_replies(self._on_tokens, self._on_record),
            self.serving.outbox.run(),
            self._beat(nonce),
            self._tick(),
            self._succession.run(),
        ]

    def _on_tokens(self, record: Tokens, timestamp_ms: int, now: float) -> None:
        with self.serving.writes:
            actions = self.serving.owner.on_tokens(record, timestamp_ms, now)
        if actions:
            self.serving.outbox.put(actions)

    def _on_record(self, record: ReplyRecord | Cancellation | Duplicate, timestamp_ms: int) -> None:
        owner = self.serving.owner
        if isinstance(record, Cancellation):
            self.serving.outbox.put(owner.on_cancellation(record))
        elif isinstance(record, Duplicate):
            owned = owner.on_duplicate(record)
            if owned is not None:
                self.serving.join(owned, record)
        else:
            self.serving.outbox.put(owner.on_record(record, timestamp_ms))

    def _on_each(self, record: object, message: ConsumerRecord) -> None:
        """Any record of this slot's reply partitions, while there may be some of earlier lives."""
        assert self._succession is not None
        assert self._own is not None
        self._succession.on_own_record(record, message)
        self._own.on_record(record, message)

    def _on_over(self, owned: OwnedRequest) -> None:
        self.serving.over(owned)
        if self._own is not None:
            self._own.on_over(owned)

    def _on_sent(self, owned: OwnedRequest, offset: int) -> None:
        self.serving.owner.on_sent(owned, offset)

    async def _beat(self, nonce: bytes) -> None:
        config = self.config
        heartbeat = Heartbeat(
            ROLE, config.slot, self.serving.owner.epoch, nonce, f"{config.http_host}:{self.port}"
        )
        due = time.monotonic()
        while True:
            try:
                await self.serving.outbox.send_heartbeat(heartbeat)
            except (TimeoutError, KafkaError) as e:
                log.warning("no heartbeat could be sent", extra={"error": repr(e)})
            due = max(due + HEARTBEAT_INTERVAL_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _tick(self) -> None:
        serving, config = self.serving, self.config
        while True:
            # A process that says it has left was maybe running something of ours: that waits for no tick.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                    await self._log.fleet_moved.wait()
            self._log.fleet_moved.clear()
            serving.hear(self._log.heard_at)
            newest = serving.view.epoch_of(ROLE, config.slot)
            if newest is not None and newest > serving.owner.epoch:
                raise SupersededError(f"slot {config.slot} was taken over: epoch {newest} has joined")
            now = time.monotonic()
            if not serving.owner.feel(now) and self._awakening is None:
                self._awakening = asyncio.create_task(self._awake())
            serving.outbox.put(serving.owner.tick(serving.view, epoch_ms(), now))
            serving.scans.tick(now)
            if self._succession is not None and self._own is not None and self._succession.own_settled:
                self._log.on_each = self._own.on_record

    async def _awake(self) -> None:
        """This process stood still for a while: first it reads what others have said meanwhile."""
        log.warning("this process was stopped, or could not run, for a while")
        try:
            async with asyncio.timeout(_AWAKE_S):
                await self._log.at_reply_end()
                if self._succession is not None:
                    await self._succession.at_end()
            self.serving.owner.held = False
        except (TimeoutError, KafkaError) as e:
            log.warning("the log cannot be read to its end; again", extra={"error": repr(e)})
        finally:
            self._awakening = None

    async def _drain(self, timeout_s: float) -> None:
        """Refuses new requests; what runs may finish. The rest is ended then, or left to others."""
        serving = self.serving
        serving.draining = True
        if self._succession is not None:
            self._succession.draining = True
        log.info("draining", extra={"running": len(serving.readers)})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await serving.all_ended()
        error = ApiError(503, "shutting_down", "this gateway is being stopped; try again", None, 1_000)
        serving.end_all(error, "shutting_down")
        # Clients get their last event, and the cancels are acked.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await serving.idle()
                await serving.outbox.drained()
                if self._succession is not None:
                    await self._succession.commit()

    async def _give_up(self) -> None:
        """This life is over: clients hear it, and nothing more is written; a successor owns what is open."""
        self.serving.draining = True
        error = ApiError(503, "gateway_lost", "this gateway lost its place; try again", None, 1_000)
        for reader in list(self.serving.readers.values()):
            reader.on_end(error)
        self.serving.scans.end_all(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self.serving.idle()

    async def _leave(self) -> None:
        record = Left(ROLE, self.config.slot, self.serving.owner.epoch, "stopped")
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self.serving.outbox.requests.send_and_wait(topics.EVENTS, encode(record), partition=0)
        except (TimeoutError, KafkaError) as e:
            log.warning("Left could not be said", extra={"error": repr(e)})

    async def _close(self) -> None:
        if self._awakening is not None:
            self._awakening.cancel()
        if hasattr(self.serving, "scans"):
            await self.serving.scans.stop()
        await self._log.stop()
        await self._offsets.stop()
        await self.serving.stores.close()
        if hasattr(self.serving, "outbox"):
            await self.serving.outbox.stop()
