import asyncio
from typing import Any

from aiokafka.errors import KafkaError

from schemas.codec import decode
from schemas.records import Heartbeat
from tests.hand_producer import settle
from workers.heartbeat import HeartbeatLoop


class Broker:
    """Acks when it is told to, as `send_and_wait` shows it."""

    def __init__(self) -> None:
        self.epochs: asyncio.Queue[int] = asyncio.Queue()
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def send_and_wait(self, topic: str, value: bytes, partition: int) -> Any:
        self.epochs.put_nowait(decode(value).epoch)
        answer = self.answer
        await answer
        self.answer = asyncio.get_running_loop().create_future()


async def test_delivered_means_a_beat_made_afterwards() -> None:
    broker, epoch = Broker(), 1
    loop = HeartbeatLoop(broker, lambda: Heartbeat("worker", 0, epoch, b""))
    beating = asyncio.create_task(loop.run())
    assert await broker.epochs.get() == 1
    epoch = 2
    delivered = asyncio.create_task(loop.delivered())
    await settle()
    broker.answer.set_result(None)  # for the beat that still says 1
    assert await broker.epochs.get() == 2
    assert not delivered.done()
    broker.answer.set_exception(KafkaError("away"))
    broker.answer = asyncio.get_running_loop().create_future()
    assert await broker.epochs.get() == 2
    assert not delivered.done()
    broker.answer.set_result(None)
    await asyncio.wait_for(delivered, 1)
    beating.cancel()
