"""Decisions go to the broker together, those of a partition in the order in which they were made."""

from aiokafka import AIOKafkaProducer

from schemas import topics
from schemas.fleet import PRODUCER_SETTINGS
from schemas.lasting_producer import lasting
from schemas.records import Decision
from schemas.topics import Layout
from streams.admission.admission import Admission
from streams.admission.arrival import OverloadPolicy
from streams.admission.decisions import DecisionLog
from streams.admission.pulse import send_decisions
from streams.admission.waiting import WaitingPolicy
from tests.log_reader import LogReader

LAYOUT = Layout(shards=2, worker_slots=1, gateway_slots=1)
COUNT = 200


def decision(number: int) -> Decision:
    inputs = {f"figure_{i}": float(number * i) for i in range(20)}
    return Decision(
        number.to_bytes(16), 1, f"tenant-{number % 5}", number % 3, "m", "dispatch", "room", inputs
    )


async def test_each_is_a_record_however_many_a_batch_holds(kafka: str) -> None:
    admission = Admission(WaitingPolicy(overload=OverloadPolicy()), DecisionLog())
    made = [decision(number) for number in range(COUNT)]
    for each in made:
        admission.decisions._hold(each)
    # Of a partition several batches, each with several decisions.
    producer = lasting(AIOKafkaProducer(bootstrap_servers=kafka, **PRODUCER_SETTINGS, max_batch_size=4_096))
    async with LogReader.open(kafka, LAYOUT, [topics.DECISIONS]) as reader, producer:
        await send_decisions(producer, admission, LAYOUT.shards)
        await reader.wait_for(lambda: len(reader.seen) == COUNT)
        assert admission.decisions.drain() == []
    for partition in {seen.partition for seen in reader.seen}:
        assert [seen.value for seen in reader.seen if seen.partition == partition] == [
            each
            for each in made
            if topics.tenant_partition(each.tenant, each.priority, LAYOUT.shards) == partition
        ]
