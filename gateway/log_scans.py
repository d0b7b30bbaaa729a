"""Reading streams back from the log: few consumers, however many clients come back, and however often.

What the gateway owns needs none (own_streams.py). Of the rest, clients whose streams lie in one reply
partition share a reading of it. Who lies behind all that run waits for a new one, which begins where the
first of those that wait begins; when it has caught up with another, that one takes its streams over. So of
many that come back at once to a partition few readings are started, and one remains.

A stream that no client reads any more is followed for a while, and its fold kept longer: who polls costs
what has come since.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gateway.kept_folds import KeptFolds, Place
from gateway.own_streams import OwnStreams
from gateway.partition_scan import PartitionScan, joinable, stream_expired
from gateway.replay import Replay, StreamFold
from schemas import topics
from schemas.api.errors import ApiError
from schemas.fleet import CONSUMER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.stop_client import stop_client

log = logging.getLogger(__name__)

_START_S = 5.0
_STOP_S = 5.0
_POLL_MS = 100
# aiokafka learns where a partition lies by failing once; with its 100 ms whoever comes back waits so long.
_RETRY_BACKOFF_MS = 10
_BATCH_RECORDS = 200
_KEPT_S = 600.0
_JUST_NOW_S = 5.0  # who polls does so oftener


class LogScans:
    """At most `most` consumers. `clock_ms()` is the log's clock (schemas/fleet.py).

    `own` is there once the gateway has joined. `started`: consumers so far. `kept_bytes` is about how much of
    streams that nobody reads is kept.
    """

    own: OwnStreams | None = None

    def __init__(
        self,
        bootstrap_servers: str,
        decode: Callable[[ConsumerRecord], Awaitable[object]],
        clock_ms: Callable[[], int],
        most: int,
        kept_bytes: int,
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._decode = decode
        self._clock_ms = clock_ms
        self._most = most
        self._scans: dict[PartitionScan, asyncio.Task[None]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._read: dict[Place, StreamFold] = {}
        self._kept = KeptFolds(kept_bytes, _KEPT_S)
        self.started = 0

    def __len__(self) -> int:
        """The consumers that clients wait for."""
        return sum(scan.read for scan in self._scans)

    def follow(self, partition: int, first_offset: int, replay: Replay) -> None:
        """Feeds `replay` until it is done or leaves. Raises ApiError 503 when there are too many scans.

        Where the log no longer holds `first_offset`, the replay's end is a 410.
        """
        now = time.monotonic()
        request_id, tenant = replay.request_id, replay.fold.tenant
        place = Place(tenant, request_id, partition, first_offset)
        fold = self._read.get(place) or self._kept.get(place)
        if fold is None or fold.lost:
            fold = None
            if self.own is not None:
                fold = self.own.fold(request_id, tenant, partition, first_offset, now)
            if fold is None:
                fold = replay.fold
                fold.position = first_offset
            fold.partition, fold.first_offset = partition, first_offset
        if not (fold.over or fold.fed):
            self._feed(fold)
        self._kept.take(place)
        self._read[place] = fold
        fold.used_at = now
        replay.attach(fold, now)

    def leave(self, replay: Replay) -> None:
        fold, now = replay.fold, time.monotonic()
        place = Place(fold.tenant, fold.request_id, fold.partition, fold.first_offset)
        if replay not in fold.views:
            return
        fold.views.remove(replay)
        fold.used_at = now
        if not fold.views and self._read.get(place) is fold:
            del self._read[place]
            if not fold.lost:
                self._kept.put(place, fold, now)

    def followed(self) -> Iterator[StreamFold]:
        """All that are fed, and that a client reads at this moment or has read just now."""
        now = time.monotonic()
        for scan in self._all():
            yield from (fold for fold in scan if fold.views or now - fold.used_at < _JUST_NOW_S)

    def tick(self, now: float) -> None:
        """Ten times a second. `now`: monotonic s."""
        self._kept.expire(now)
        if self.own is not None:
            self.own.tick(now, self._clock_ms())

    def end_all(self, error: ApiError) -> None:
        for scan in self._all():
            scan.end_all(error)

    async def stop(self) -> None:
        tasks = [*self._scans.values(), *self._stopping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _all(self) -> list[PartitionScan]:
        own = [] if self.own is None else self.own.feeds.values()
        return [*self._scans, *own]

    def _feed(self, fold: StreamFold) -> None:
        scan = joinable(self._all(), fold.partition, fold.position)
        if scan is None:
            if len(self._scans) >= self._most:
                self._make_room()
            scan = PartitionScan(fold.partition)
            task = asyncio.create_task(self._run(scan))
            self.started += 1
            self._scans[scan] = task
            task.add_done_callback(lambda _: self._scans.pop(scan, None))
        fold.caught_up = scan.caught_up and fold.position == scan.position
        scan.join(fold)

    def _make_room(self) -> None:
        """Ends the scan that no client has waited for for longest. Raises ApiError 503 if there is none."""
        idle = [scan for scan in self._scans if not scan.read]
        if not idle:
            message = "too many streams are being read back from the log; try again"
            raise ApiError(503, "too_many_replays", message, None, 1_000)
        scan = min(idle, key=lambda scan: scan.used_at)
        for fold in list(scan):
            scan.drop(fold)
        task = self._scans.pop(scan)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
        task.cancel()

    async def _run(self, scan: PartitionScan) -> None:
        settings = {**CONSUMER_SETTINGS, "retry_backoff_ms": _RETRY_BACKOFF_MS}
        consumer = AIOKafkaConsumer(**client_settings(self._bootstrap_servers), **settings)
        try:
            await self._read_log(scan, consumer)
        except OffsetOutOfRangeError:
            scan.end_all(stream_expired())
        except (TimeoutError, KafkaError) as e:
            log.warning("a scan ends", extra={"partition": scan.partition, "error": repr(e)})
            scan.end_all(
                ApiError(503, "broker_unavailable", "the log cannot be read; try again", None, 1_000)
            )
        except Exception:
            log.exception("a scan failed", extra={"partition": scan.partition})
            scan.end_all(ApiError(500, "internal_error", "the gateway failed to read the log"))
        finally:
            # No one may join what reads no more.
            self._scans.pop(scan, None)
            await stop_client(consumer, _STOP_S)

    async def _read_log(self, scan: PartitionScan, consumer: AIOKafkaConsumer) -> None:
        partition = TopicPartition(topics.TOKENS, scan.partition)
        async with asyncio.timeout(_START_S):
            await consumer.start()
            beginning = (await consumer.beginning_offsets([partition]))[partition]
            end = (await consumer.end_offsets([partition]))[partition]
        begin = scan.begin(beginning, end)
        if begin is None:
            return
        # With nothing awaited in between: a partition without a place is an error to the consumer.
        consumer.assign([partition])
        consumer.seek(partition, begin)
        while scan.wanted:
            batches = await consumer.getmany(partition, timeout_ms=_POLL_MS, max_records=_BATCH_RECORDS)
            for messages in batches.values():
                others = [s for s in self._all() if s.partition == scan.partition]
                await scan.give(messages, self._decode, others)
            highwater = consumer.highwater(partition)
            caught_up = highwater is not None and scan.position == highwater
            scan.tick(time.monotonic(), self._clock_ms() if caught_up else None)
            # getmany answers at once while it has records: the live streams come first.
            await asyncio.sleep(0)
