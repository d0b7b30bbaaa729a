"""Kafka clients when the broker is away for longer than a request may take, and producers that it refuses."""

import ast
import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import MessageSizeTooLargeError, UnknownError
from aiokafka.producer.sender import InitPIDHandler

from infra.local.broker import Broker
from infra.local.paths import PROJECT_ROOT
from infra.topics.create import create
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from schemas.lasting_producer import lasting
from schemas.stop_client import stop_client
from schemas.topics import TopicSpec

TIMEOUT_S = 1.0


class Sender:
    """A producer, and a topic of its own whose records are small."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._kafka, self.topic = broker.bootstrap_servers, topic
        settings = {**PRODUCER_SETTINGS, "request_timeout_ms": int(TIMEOUT_S * 1000)}
        self.producer = lasting(AIOKafkaProducer(bootstrap_servers=self._kafka, **settings))

    async def start(self) -> "Sender":
        await create(self._kafka, [TopicSpec(self.topic, 2, {"max.message.bytes": "1000"})], 1)
        await self.producer.start()
        await self.producer.partitions_for(self.topic)
        return self

    async def send(self, value: bytes, partition: int = 0) -> "asyncio.Task[int]":
        """Hands it over at once; the task gives its offset when it is there."""
        acked = await self.producer.send(self.topic, value, partition=partition)

        async def offset() -> int:
            place: int = (await acked).offset
            return place

        return asyncio.create_task(offset())


async def test_an_outage_longer_than_a_request_may_take(own_broker: Broker) -> None:
    sender = await Sender(own_broker, "outage").start()
    assert await (await sender.send(b"before")) == 0
    consumer = AIOKafkaConsumer(bootstrap_servers=own_broker.bootstrap_servers, **CONSUMER_SETTINGS)
    await consumer.start()
    consumer.assign([partition := TopicPartition(sender.topic, 0)])
    consumer.seek(partition, 0)
    assert (await consumer.getone()).value == b"before"
    await own_broker.stop()
    # What a broker that shuts down answers to who asks it then: it leads no partition any more.
    partitions = sender.producer.client.cluster._partitions[sender.topic]
    partitions.update({number: found._replace(leader=-1) for number, found in partitions.items()})
    waiting = [await sender.send(b"meanwhile %d" % i) for i in range(3)]
    await asyncio.sleep(2 * TIMEOUT_S)
    waiting.append(await sender.send(b"later"))
    assert not any(each.done() for each in waiting)
    # aiokafka's own `stop` raises CancelledError here, of a fetch that was to be tried again.
    await asyncio.wait_for(stop_client(consumer, 10), 5)
    await own_broker.start()
    async with asyncio.timeout(30):
        assert await asyncio.gather(*waiting) == [1, 2, 3, 4]
        assert await (await sender.send(b"after")) == 5
        await sender.producer.stop()


async def test_what_is_refused_stands_in_the_way_of_nothing(broker: Broker) -> None:
    sender = await Sender(broker, "refused").start()
    async with asyncio.timeout(30):
        assert await (await sender.send(b"before")) == 0
        for offset in (1, 2):
            refused = await sender.send(bytes(2000))
            # One goes in the same request to another partition, one in the same batch.
            beside, behind = await sender.send(b"beside", partition=1), await sender.send(b"behind")
            assert await beside == offset - 1
            for each in (refused, behind):
                with pytest.raises(MessageSizeTooLargeError):
                    await each
            assert await (await sender.send(b"behind")) == offset
        await sender.producer.stop()


async def test_no_id_is_to_be_had_for_a_while(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = await Sender(broker, "no-id").start()
    answered, unanswered = InitPIDHandler.handle_response, iter(range(2))

    def cannot_tell(handler: InitPIDHandler, response: object) -> object:
        if next(unanswered, None) is not None:
            raise UnknownError("no ids to be had")
        return answered(handler, response)

    monkeypatch.setattr(InitPIDHandler, "handle_response", cannot_tell)
    async with asyncio.timeout(30):
        with pytest.raises(MessageSizeTooLargeError):
            await (await sender.send(bytes(2000)))
        assert await (await sender.send(b"after")) == 0
        assert next(unanswered, None) is None
        await sender.producer.stop()


def test_every_idempotent_producer_of_a_service_is_a_lasting_one() -> None:
    made, lasting_ones = [], []
    for package in ("gateway", "streams", "workers"):
        for file in (PROJECT_ROOT / package).rglob("*.py"):
            for call in (
                node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
            ):
                match call.func, call.args:
                    case ast.Name("AIOKafkaProducer"), _:
                        made.append(ast.unparse(call))
                    case ast.Name("lasting"), [argument]:
                        lasting_ones.append(ast.unparse(argument))
    others = [call for call in made if call not in lasting_ones]
    # Heartbeats are not idempotent, and a transactional one is made anew with each failure.
    assert [c for c in others if "HEARTBEAT_PRODUCER_SETTINGS" not in c and "transactional_id" not in c] == []
    assert len(lasting_ones) >= 9
