"""Where records go that this worker cannot read."""

import asyncio
import logging

from aiokafka import AIOKafkaProducer, ConsumerRecord
from aiokafka.errors import KafkaError

from schemas import topics
from schemas.dead_letters import dead_letter

log = logging.getLogger(__name__)


class DeadLetterBox:
    def __init__(self, producer: AIOKafkaProducer, timeout_s: float) -> None:
        self._producer = producer
        self._timeout_s = timeout_s
        self._sending: set[asyncio.Task[None]] = set()

    def put(self, record: ConsumerRecord, reason: str) -> None:
        """Whatever becomes of it: no request depends on it, and the record lies in its own topic too."""
        task = asyncio.create_task(self._send(record, reason))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, record: ConsumerRecord, reason: str) -> None:
        topic = topics.dlq(record.topic)
        letter = dead_letter(record.key, record.value, record.headers, reason)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._producer.send_and_wait(
                    topic, letter.value, letter.key, record.partition, headers=letter.headers
                )
        except (KafkaError, TimeoutError) as error:
            told = {"topic": topic, "offset": record.offset, "error": repr(error)}
            log.error("a record could not go to the dead letters", extra=told)
