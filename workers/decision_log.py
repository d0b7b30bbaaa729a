"""What a worker decided about requests, for replay and audit: the preemptions, on fleet.decisions."""

import logging

from aiokafka import AIOKafkaProducer

from schemas import topics
from schemas.codec import encode
from schemas.records import Preemption
from workers.batch import Preempted
from workers.lane import Lane

log = logging.getLogger(__name__)


class DecisionLog:
    """Bounded by leaving out: nothing that is served waits for these records, so while `max_records` of them
    are not acked, more are dropped and counted in `num_dropped`.
    """

    def __init__(
        self,
        slot: int,
        epoch: int,
        model: str,
        shards: int,
        producer: AIOKafkaProducer,
        *,
        max_records: int,
    ) -> None:
        self.num_dropped = 0
        self._slot = slot
        self._epoch = epoch
        self._model = model
        self._shards = shards
        self._producer = producer
        self._max_records = max_records
        self._lanes: dict[int, Lane] = {}
        self._broken = False

    def preempted(self, event: Preempted) -> None:
        """Logs it, and sends it in the background, in the order of the victim's partition."""
        victim = event.victim
        record = Preemption(
            request_id=victim.request_id,
            attempt=victim.attempt,
            tenant=victim.tenant,
            priority=victim.priority,
            model=self._model,
            slot=self._slot,
            epoch=self._epoch,
            reason=str(event.reason),
            mode=str(event.mode),
            tokens_lost=event.num_tokens_lost,
            for_request_id=event.for_request.request_id,
        )
        log.info(
            "preempted",
            extra={
                "request_id": record.request_id,
                "attempt": record.attempt,
                "reason": record.reason,
                "mode": record.mode,
                "tokens_lost": record.tokens_lost,
                "for_request_id": record.for_request_id,
            },
        )
        if self._broken or sum(lane.num_unacked for lane in self._lanes.values()) >= self._max_records:
            self.num_dropped += 1
            return
        self._lane(topics.tenant_partition(record.tenant, record.priority, self._shards)).put(encode(record))

    async def close(self) -> None:
        """Stops sending. What is unacked may or may not arrive."""
        for lane in self._lanes.values():
            await lane.close()

    def _lane(self, partition: int) -> Lane:
        lane = self._lanes.get(partition)
        if lane is None:
            lane = Lane(self._producer, topics.DECISIONS, partition, lambda lane: None, self._on_error)
            self._lanes[partition] = lane
        return lane

    def _on_error(self, error: BaseException) -> None:
        if not self._broken:
            log.error("fleet.decisions takes no records; they are left out", extra={"error": repr(error)})
        self._broken = True
