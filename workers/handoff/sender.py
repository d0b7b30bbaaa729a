"""Messages of handoffs to other workers: to a partition each in order, and nobody waits."""

from collections.abc import Callable

from aiokafka import AIOKafkaProducer

from schemas import topics
from schemas.codec import encode
from schemas.headers import Headers, ReplyTo, reply_headers
from schemas.records import Offer
from workers.handoff.effects import Send
from workers.lane import Lane


class HandoffSender:
    """`on_fatal` gets the error after which messages may be missing."""

    def __init__(self, producer: AIOKafkaProducer, on_fatal: Callable[[BaseException], None]) -> None:
        self._producer = producer
        self._on_fatal = on_fatal
        self._lanes: dict[int, Lane] = {}
        self._traceparents: dict[bytes, str] = {}

    def trace(self, transfer_id: bytes, traceparent: str | None) -> None:
        """The offer that is sent next goes with it."""
        if traceparent is not None:
            self._traceparents[transfer_id] = traceparent

    def send(self, message: Send) -> None:
        partition = topics.partition(message.slot, message.priority)
        lane = self._lanes.get(partition)
        if lane is None:
            lane = Lane(self._producer, topics.DECODE, partition, lambda lane: None, self._on_fatal)
            self._lanes[partition] = lane
        lane.put(encode(message.record), self._headers(message))

    @property
    def is_empty(self) -> bool:
        return all(lane.num_unacked == 0 for lane in self._lanes.values())

    def halt(self) -> None:
        """Hands nothing more to Kafka."""
        for lane in self._lanes.values():
            lane.halt()

    async def close(self) -> None:
        """Stops sending. What is unacked may or may not arrive."""
        for lane in self._lanes.values():
            await lane.close()

    def _headers(self, message: Send) -> Headers | None:
        """An offer that decode cannot read is refused to its owner by these."""
        record = message.record
        if not isinstance(record, Offer):
            return None
        request = record.request
        to = ReplyTo(request.request_id, request.attempt, request.reply_partition)
        return reply_headers(to, self._traceparents.pop(record.transfer_id, None))
