"""The order of what a gateway writes, with a producer whose acks the test gives by hand."""

import asyncio

import pytest
from aiokafka.errors import MessageSizeTooLargeError

from gateway.actions import Announce, SendRequest
from gateway.metrics import Timing
from gateway.outbox import Outbox
from gateway.owner import Owner
from gateway.reader import WholeReader
from schemas.records import Attach
from tests.gateway_factories import EPOCH, NOWHERE, SLOT, inference_request
from tests.hand_producer import HandProducer, settle


@pytest.mark.parametrize("by_broker", [False, True])
async def test_a_request_too_large_is_its_owners_to_end_and_holds_up_nothing(by_broker: bool) -> None:
    outbox, producer = Outbox(NOWHERE, lambda owned, offset: None), HandProducer()
    await outbox.stop()
    outbox.requests = producer
    owner = Owner(SLOT, EPOCH, shards=4, cancel_timeout_ms=30_000)
    owned = owner.accept(inference_request(), WholeReader("simulated", Timing(), 0.0))
    too_large, word = MessageSizeTooLargeError(), Attach(bytes(16), SLOT, EPOCH)
    producer.refuse = [] if by_broker else [too_large]
    running = asyncio.create_task(outbox.run())
    outbox.put([SendRequest(owned), Announce(word, 3)])
    await settle()
    if by_broker:
        producer.sent[0][3].set_exception(too_large)
        await settle()
    assert owned.oversized
    assert producer.values[-1] == word
    producer.ack()
    await asyncio.wait_for(outbox.drained(), 1)
    running.cancel()
