"""What admission has decided reaches a broker that is away meanwhile, or is refused when its time is over."""

import asyncio
import time

import pytest
from aiokafka import AIOKafkaProducer

from infra.local.broker import Broker
from infra.topics.create import create_topics
from schemas import topics
from schemas.codec import encode
from schemas.fleet import PRODUCER_SETTINGS
from schemas.lasting_producer import lasting
from schemas.records import Dispatched, Heartbeat, Idempotency, InferenceRequest, Rejected
from streams.admission import dispatcher as dispatching
from streams.admission.admission import Admission
from streams.admission.decisions import DecisionLog
from streams.admission.dispatcher import Dispatcher
from streams.admission.metrics import Metrics
from streams.admission.waiting import WaitingPolicy
from tests.admission_harness import LAYOUT, make_request, make_status, make_tenant
from tests.log_reader import LogReader

TRY_S = 0.3


@pytest.fixture
async def broker(own_broker: Broker) -> Broker:
    await create_topics(own_broker.bootstrap_servers, LAYOUT)
    return own_broker


def now() -> int:
    return time.time_ns() // 1_000_000


def admission() -> Admission:
    """With a worker that has room."""
    found = Admission(WaitingPolicy(), DecisionLog())
    found.on_assigned({0: 0}, now())
    found.on_tenant("demo", make_tenant(), now())
    found.fleet.on_heartbeat(Heartbeat("worker", 0, 10, b"", worker=make_status()), 100)
    found.fleet_changed(now())
    return found


def request(number: int, end_ms: int = 60_000) -> InferenceRequest:
    return make_request(idempotency=Idempotency(bytes([number] * 16), bytes(16), "first"), end_ms=end_ms)


async def test_dispatches_wait_for_a_broker_that_is_away(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "SEND_TIMEOUT_S", TRY_S)
    kafka, decider = broker.bootstrap_servers, admission()
    # Each record fills a batch: of a partition the producer takes one, and the next when that is gone.
    producer = lasting(AIOKafkaProducer(bootstrap_servers=kafka, **PRODUCER_SETTINGS, max_batch_size=1))
    async with LogReader.open(kafka, LAYOUT, [topics.TOKENS]) as reader, producer:
        for topic in (topics.IDEMPOTENCY, topics.PREFILL, topics.TOKENS):
            await producer.partitions_for(topic)
        dispatcher = Dispatcher(producer, decider, Metrics(), now, lambda: (0, 1))
        running = asyncio.create_task(dispatcher.run())
        await broker.stop()
        late = request(3, end_ms=int(TRY_S * 1000))
        patient = [request(1), request(2), request(4), request(5)]
        for each in (*patient[:2], late, *patient[2:]):
            dispatcher.put(decider.on_request(each, encode(each), 0, 5, None, now()))
        await asyncio.sleep(4 * TRY_S)
        # Only what the fleet's heartbeats outrun is overdue.
        assert dispatcher.oldest_unacked_s() == 0
        decider.fleet.on_heartbeat(Heartbeat("worker", 0, 10, b"", worker=make_status()), 300)
        assert dispatcher.oldest_unacked_s() == 0.2
        await broker.start()
        said = {}

        def all_answered() -> bool:
            said.update({seen.value.request_id: seen.value for seen in reader.seen})
            return len(said) == len(patient) + 1

        await reader.wait_for(all_answered)
        assert all(isinstance(said[each.request_id], Dispatched) for each in patient)
        refused = said[late.request_id]
        assert isinstance(refused, Rejected)
        assert (refused.status, refused.code) == (503, "expired")
        async with asyncio.timeout(10):
            await dispatcher.drain()
        assert dispatcher.oldest_unacked_s() == 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
