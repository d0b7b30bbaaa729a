"""One reading of a reply partition, for all clients that read streams from it."""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator

from aiokafka import ConsumerRecord

from gateway.replay import Replay
from schemas.api.errors import ApiError
from schemas.records import Cancellation, Claim, Described, Tokens
from schemas.stream_state import ReplyRecord, Run

TICK_S = 0.1


def stream_expired() -> ApiError:
    return ApiError(410, "stream_expired", "the log no longer holds the beginning of this stream")


def joinable(scans: Iterable["PartitionScan"], partition: int, first_offset: int) -> "PartitionScan | None":
    """The one with least to read before `first_offset`, else one that has not begun; None: begin another."""
    able = [s for s in scans if s.partition == partition and s.may_join(first_offset)]
    return max(able, key=lambda scan: scan.position or 0, default=None)


class PartitionScan:
    """Gives records to the replays that joined. Pure: who reads Kafka drives it.

    `position`: all before it was given; None until the scan has begun, and whoever joins until then is
    waited for: it begins at the first of their offsets.
    """

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.position: int | None = None
        self.replays: dict[bytes, list[Replay]] = {}
        self._waiting: list[tuple[int, Replay]] = []
        self._newest_ms = 0
        self._ticked_at = 0.0

    @property
    def wanted(self) -> bool:
        return bool(self.replays or self._waiting)

    def may_join(self, first_offset: int) -> bool:
        """Nothing from `first_offset` on was given yet."""
        return self.position is None or first_offset >= self.position

    def join(self, first_offset: int, replay: Replay) -> None:
        if self.position is None:
            self._waiting.append((first_offset, replay))
        else:
            self._add(replay)

    def begin(self, beginning: int, end: int) -> int | None:
        """Where to read from, None if there is no one to read for. The log holds [beginning, end)."""
        offsets = []
        for first_offset, replay in self._waiting:
            if beginning <= first_offset <= end:
                offsets.append(first_offset)
                self._add(replay)
            else:
                replay.reader.on_end(stream_expired())
        self._waiting.clear()
        self.position = min(offsets, default=None)
        return self.position

    async def give(
        self,
        messages: list[ConsumerRecord],
        decode: Callable[[ConsumerRecord], Awaitable[object]],
        others: Iterable["PartitionScan"],
    ) -> None:
        """The next records, up to where one of `others` (same partition) stands: it takes over there."""
        now = time.monotonic()
        for message in messages:
            record = await decode(message)
            if self._meet(others, message.offset):
                return
            self._give(record, message.timestamp, now)
            self.position = message.offset + 1
            self._newest_ms = message.timestamp
        if self.position is not None:
            self._meet(others, self.position)

    def tick(self, now: float, clock_ms: int | None) -> None:
        """Looks ten times a second at most. `clock_ms`: the log's clock, if all that there is was given."""
        if now - self._ticked_at < TICK_S:
            return
        self._ticked_at = now
        for replay in list(self._all()):
            replay.reader.on_quiet(now)
            replay.on_time(self._newest_ms, clock_ms)
            if replay.done:
                self.leave(replay)

    def leave(self, replay: Replay) -> None:
        self._waiting = [entry for entry in self._waiting if entry[1] is not replay]
        those = self.replays.get(replay.request_id)
        if those is not None and replay in those:
            those.remove(replay)
            if not those:
                del self.replays[replay.request_id]

    def end_all(self, error: ApiError) -> None:
        for replay in [*self._all(), *(replay for _, replay in self._waiting)]:
            replay.reader.on_end(error)
        self.replays.clear()
        self._waiting.clear()

    def _meet(self, others: Iterable["PartitionScan"], offset: int) -> bool:
        """Hands all replays to another scan that stands at `offset`: from there on one reading is enough."""
        for other in others:
            if other is not self and other.position == offset and other.wanted:
                for replay in self._all():
                    other._add(replay)
                self.replays.clear()
                return True
        return False

    def _add(self, replay: Replay) -> None:
        self.replays.setdefault(replay.request_id, []).append(replay)

    def _all(self) -> Iterator[Replay]:
        return (replay for those in self.replays.values() for replay in those)

    def _give(self, record: object, timestamp_ms: int, now: float) -> None:
        find = self.replays.get
        if type(record) is Tokens:
            run = Run(record.slot, record.epoch)
            for chunk in record.chunks:
                for replay in find(chunk.request_id, ()):
                    replay.on_chunk(run, chunk, timestamp_ms, now)
        elif isinstance(record, Cancellation):
            for replay in find(record.request_id, ()):
                replay.on_cancellation(record)
        elif isinstance(record, Described):
            for replay in find(record.request_id, ()):
                replay.on_description(record)
        elif isinstance(record, ReplyRecord):
            if isinstance(record, Claim) and record.request_id is None:
                those = list(self._all())
            else:
                assert record.request_id is not None
                those = find(record.request_id, [])
            for replay in those:
                replay.on_record(record, timestamp_ms)
