"""What is left out of fleet.decisions, and what is not, with a producer whose acks the test gives by hand."""

from typing import cast

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from schemas import topics
from schemas.records import Preemption
from tests.engine_factories import make_request
from tests.hand_producer import HandProducer, settle
from workers.batch import Preempted, PreemptionMode, PreemptionReason
from workers.decision_log import DecisionLog

SHARDS = 4


def make(producer: HandProducer, max_records: int = 8) -> DecisionLog:
    return DecisionLog(3, 77, "gemma", SHARDS, cast(AIOKafkaProducer, producer), max_records=max_records)


def event(number: int = 1) -> Preempted:
    victim = make_request(number)
    victim.tenant = "acme"
    return Preempted(victim, PreemptionReason.NO_FREE_BLOCK, PreemptionMode.RECOMPUTE, 40, make_request(99))


async def test_a_preemption_is_a_record_in_its_tenants_partition() -> None:
    producer = HandProducer()
    decisions = make(producer)
    preempted = event()
    decisions.preempted(preempted)
    await settle()
    (topic, partition, value, _), *others = producer.sent
    assert others == []
    assert (topic, partition) == (topics.DECISIONS, topics.tenant_partition("acme", 0, SHARDS))
    assert value == Preemption(
        request_id=preempted.victim.request_id,
        attempt=1,
        tenant="acme",
        priority=0,
        model="gemma",
        slot=3,
        epoch=77,
        reason="no_free_block",
        mode="recompute",
        tokens_lost=40,
        for_request_id=preempted.for_request.request_id,
    )
    await decisions.close()


async def test_with_the_broker_away_records_are_dropped_and_counted() -> None:
    producer = HandProducer()
    decisions = make(producer, max_records=3)
    for number in range(5):
        decisions.preempted(event(number))
    await settle()
    assert (len(producer.sent), decisions.num_dropped) == (3, 2)
    producer.ack(2)
    await settle()
    decisions.preempted(event(9))
    await settle()
    assert (len(producer.sent), decisions.num_dropped) == (4, 2)
    await decisions.close()


async def test_a_topic_that_takes_nothing_ends_nothing() -> None:
    producer = HandProducer()
    producer.refuse = [KafkaError("not authorized")]
    decisions = make(producer)
    decisions.preempted(event())
    await settle()
    decisions.preempted(event(2))
    assert decisions.num_dropped == 1
    await decisions.close()
