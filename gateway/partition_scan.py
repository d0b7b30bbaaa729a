"""One reading of a reply partition, for all streams that are read from it."""

from collections.abc import Awaitable, Callable, Iterable, Iterator

from aiokafka import ConsumerRecord

from gateway.replay import StreamFold
from gateway.turn import Turn
from schemas.api.errors import ApiError
from schemas.codec import default_codec
from schemas.records import Cancellation, Claim, Described, Tokens
from schemas.stream_state import ReplyRecord, Run

TICK_S = 0.1
# A client that polls, or has lost its connection, comes back within this; until then its stream is read on.
FOLLOW_S = 60.0

# To look for an id takes 0.1 to 0.4 us, to decode a step of 1, 16, 64 sequences 4, 30, 112 us (2-core CI
# machine): for one id 1.5 us are left of that. For more ids than this in so many bytes decoding is cheaper.
_BYTES_AN_ID = 4


def stream_expired() -> ApiError:
    return ApiError(410, "stream_expired", "the log no longer holds the beginning of this stream")


def joinable(scans: Iterable["PartitionScan"], partition: int, position: int) -> "PartitionScan | None":
    """The one with least to read before `position`, else one that has not begun; None: begin another."""
    able = [s for s in scans if s.partition == partition and s.may_join(position)]
    return max(able, key=lambda scan: scan.position or 0, default=None)


class PartitionScan:
    """Gives records to the folds that joined. Pure: who reads Kafka drives it.

    `position`: all before it was given; None until the scan has begun, and whoever joins until then is
    waited for: it begins at the first of their places. A `lasting` one is there whether it has folds or not:
    what reads the partition anyway drives it.
    """

    def __init__(self, partition: int, lasting_from: int | None = None) -> None:
        self.partition = partition
        self.position = lasting_from
        self.lasting = lasting_from is not None
        self.caught_up = self.lasting
        self.folds: dict[bytes, list[StreamFold]] = {}
        self._waiting: list[StreamFold] = []
        self._newest_ms = 0
        self._ticked_at = 0.0
        self._class_of = default_codec().record_class

    @property
    def wanted(self) -> bool:
        return bool(self.folds or self._waiting)

    @property
    def read(self) -> bool:
        """A client waits for what it gives."""
        return any(fold.views for fold in self)

    @property
    def used_at(self) -> float:
        """When a client last came or left (monotonic s)."""
        return max((fold.used_at for fold in self), default=0.0)

    def __iter__(self) -> Iterator[StreamFold]:
        """All that joined."""
        yield from self._waiting
        for those in self.folds.values():
            yield from those

    def may_join(self, position: int) -> bool:
        """Nothing from `position` on was given yet; and if it is lasting, there is such a place."""
        if self.lasting:
            return position == self.position
        return self.position is None or position >= self.position

    def join(self, fold: StreamFold) -> None:
        """It lacks what lies from its position on."""
        fold.fed = True
        if self.position is None:
            self._waiting.append(fold)
        else:
            self._add(fold)

    def begin(self, beginning: int, end: int) -> int | None:
        """Where to read from, None if there is no one to read for. The log holds [beginning, end)."""
        for fold in self._waiting:
            if beginning <= fold.position <= end:
                self._add(fold)
            else:
                fold.fed = False
                fold.lose(stream_expired())
        self._waiting.clear()
        self.position = min((fold.position for fold in self), default=None)
        return self.position

    async def give(
        self,
        messages: list[ConsumerRecord],
        decode: Callable[[ConsumerRecord], Awaitable[object]],
        others: Iterable["PartitionScan"],
    ) -> None:
        """The next records, up to where one of `others` (same partition) stands: it takes over there."""
        turn = Turn()
        for message in messages:
            record = await decode(message) if self._concerns(message.value or b"") else None
            if self._meet(others, message.offset):
                return
            self.on_record(record, message.offset, message.timestamp, turn.now)
            await turn.take_turns()
        if self.position is not None:
            self._meet(others, self.position)

    def on_record(self, record: object, offset: int, timestamp_ms: int, now: float) -> None:
        """The next one, None for one that concerns nobody. `now`: monotonic s."""
        if record is not None and self.folds:
            self._give(record, timestamp_ms, now)
        self.position = offset + 1
        self._newest_ms = timestamp_ms

    def tick(self, now: float, clock_ms: int | None) -> None:
        """Looks ten times a second at most. `clock_ms`: the log's clock, if all that there is was given."""
        if now - self._ticked_at < TICK_S:
            return
        self._ticked_at = now
        self.caught_up = clock_ms is not None
        for fold in list(self):
            for view in fold.views:
                view.reader.on_quiet(now)
            fold.on_time(self._newest_ms, clock_ms)
            unwanted = not fold.views and (not fold.kept or now - fold.used_at >= FOLLOW_S)
            if fold.done or unwanted:
                self.drop(fold)

    def drop(self, fold: StreamFold) -> None:
        """Gives it nothing more: it stands where this scan does."""
        fold.fed = False
        if fold in self._waiting:
            self._waiting.remove(fold)
            return
        if self.position is not None:
            fold.position = self.position
        those = self.folds[fold.request_id]
        those.remove(fold)
        if not those:
            del self.folds[fold.request_id]

    def end_all(self, error: ApiError) -> None:
        for fold in list(self):
            self.drop(fold)
            fold.lose(error)

    def _meet(self, others: Iterable["PartitionScan"], offset: int) -> bool:
        """Hands all folds to another scan that stands at `offset`: from there on one reading is enough."""
        for other in others:
            if other is not self and other.position == offset and (other.lasting or other.wanted):
                for fold in self:
                    other._add(fold)
                self.folds.clear()
                return True
        return False

    def _add(self, fold: StreamFold) -> None:
        self.folds.setdefault(fold.request_id, []).append(fold)

    def _concerns(self, value: bytes) -> bool:
        """False for a record that is about none of the folds: it need not be decoded.

        An id is 16 bytes that stand in a record as they are; only a Claim may mean a request that it does not
        name, and what a header is that is not known, decoding says.
        """
        if len(self.folds) * _BYTES_AN_ID > len(value):
            return True
        return any(map(value.__contains__, self.folds)) or self._class_of(value) in (Claim, None)

    def _give(self, record: object, timestamp_ms: int, now: float) -> None:
        find = self.folds.get
        if type(record) is Tokens:
            run = Run(record.slot, record.epoch)
            for chunk in record.chunks:
                for fold in find(chunk.request_id, ()):
                    fold.on_chunk(run, chunk, timestamp_ms, now)
        elif isinstance(record, Cancellation):
            for fold in find(record.request_id, ()):
                fold.on_cancellation(record)
        elif isinstance(record, Described):
            for fold in find(record.request_id, ()):
                fold.on_description(record)
        elif isinstance(record, ReplyRecord):
            if isinstance(record, Claim) and record.request_id is None:
                those = list(self)
            else:
                assert record.request_id is not None
                those = find(record.request_id, [])
            for fold in those:
                fold.on_record(record, timestamp_ms)
