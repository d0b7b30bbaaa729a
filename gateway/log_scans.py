"""Reading streams back from the log: few consumers, however many clients come back.

Clients whose streams lie in one reply partition share a reading of it. Who lies behind all that run waits for
a new one, which begins where the first of those that wait begins; when it has caught up with another, that
one takes its clients over. So of many that come back at once to a partition few readings are started, and
one remains.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gateway.partition_scan import PartitionScan, joinable, stream_expired
from gateway.replay import Replay
from schemas import topics
from schemas.api.errors import ApiError
from schemas.fleet import CONSUMER_SETTINGS

log = logging.getLogger(__name__)

_START_S = 5.0
_STOP_S = 5.0
_POLL_MS = 100
# aiokafka learns where a partition lies by failing once; with its 100 ms whoever comes back waits so long.
_RETRY_BACKOFF_MS = 10
_BATCH_RECORDS = 200  # some ms of decoding: the live streams' records wait no longer


class LogScans:
    """At most `most` consumers. `clock_ms()` is the log's clock (schemas/fleet.py)."""

    def __init__(
        self,
        bootstrap_servers: str,
        decode: Callable[[ConsumerRecord], Awaitable[object]],
        clock_ms: Callable[[], int],
        most: int,
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._decode = decode
        self._clock_ms = clock_ms
        self._most = most
        self._scans: dict[PartitionScan, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._scans)

    def follow(self, partition: int, first_offset: int, replay: Replay) -> None:
        """Feeds `replay` until it is done or leaves. Raises ApiError 503 when there are too many scans.

        Where the log no longer holds `first_offset`, the replay's end is a 410.
        """
        scan = joinable(self._scans, partition, first_offset)
        if scan is not None:
            scan.join(first_offset, replay)
            return
        if len(self._scans) >= self._most:
            message = "too many streams are being read back from the log; try again"
            raise ApiError(503, "too_many_replays", message, None, 1_000)
        scan = PartitionScan(partition)
        scan.join(first_offset, replay)
        task = asyncio.create_task(self._run(scan))
        self._scans[scan] = task
        task.add_done_callback(lambda _: self._scans.pop(scan, None))

    def replays(self) -> Iterator[tuple[int, Replay]]:
        """All that are fed, with their partitions."""
        return (
            (scan.partition, replay)
            for scan in self._scans
            for those in scan.replays.values()
            for replay in those
        )

    def leave(self, replay: Replay) -> None:
        for scan in self._scans:
            scan.leave(replay)

    def end_all(self, error: ApiError) -> None:
        for scan in self._scans:
            scan.end_all(error)

    async def stop(self) -> None:
        tasks = list(self._scans.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, scan: PartitionScan) -> None:
        settings = {**CONSUMER_SETTINGS, "retry_backoff_ms": _RETRY_BACKOFF_MS}
        consumer = AIOKafkaConsumer(bootstrap_servers=self._bootstrap_servers, **settings)
        try:
            await self._read(scan, consumer)
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
            with suppress(TimeoutError, KafkaError):
                await asyncio.wait_for(consumer.stop(), _STOP_S)

    async def _read(self, scan: PartitionScan, consumer: AIOKafkaConsumer) -> None:
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
                others = [s for s in self._scans if s.partition == scan.partition]
                await scan.give(messages, self._decode, others)
            highwater = consumer.highwater(partition)
            caught_up = highwater is not None and scan.position == highwater
            scan.tick(time.monotonic(), self._clock_ms() if caught_up else None)
            # getmany answers at once while it has records: the live streams come first.
            await asyncio.sleep(0)
