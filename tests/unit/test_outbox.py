"""The order of tokens, usage and Completion, with a producer whose acks the test gives by hand."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, KafkaTimeoutError

from schemas import topics
from schemas.headers import ReplyTo
from schemas.records import Completion, Dispatch, Tokens, Usage
from schemas.token_records import TokenChunk
from tests.hand_producer import HandProducer, settle
from tests.worker_harness import make_inference_request
from workers.live_requests import End, LiveRequest, LiveRequests
from workers.outbox import Outbox
from workers.request import FinishReason

MAX_RECORDS = 8
REPLY = topics.partition(1, 0)


@dataclass
class Bench:
    tokens: HandProducer = field(default_factory=HandProducer)
    usage: HandProducer = field(default_factory=HandProducer)
    blocked: list[frozenset[int]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    live: LiveRequests = field(default_factory=lambda: LiveRequests(0, 9, "simulated", 300))

    def __post_init__(self) -> None:
        self.outbox = Outbox(
            0,
            9,
            "simulated",
            2,
            cast(AIOKafkaProducer, self.tokens),
            cast(AIOKafkaProducer, self.usage),
            max_records=MAX_RECORDS,
            on_blocked=self.blocked.append,
            on_fatal=self.errors.append,
        )

    def take(self, num_output_tokens: int = 0) -> LiveRequest:
        taken = self.live.on_dispatch(Dispatch(0, 9, 5, make_inference_request()), 0.0)
        assert taken is not None
        taken[0].num_output_tokens = num_output_tokens
        return taken[0]

    def send(self, live: LiveRequest, position: int) -> None:
        chunk = TokenChunk(live.request.request_id, 1, position, [65])
        self.outbox.send_tokens(REPLY, [chunk])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.outbox.close()


async def test_each_step_of_an_end_waits_for_the_ack_of_the_one_before(bench: Bench) -> None:
    live = bench.take(num_output_tokens=2)
    bench.send(live, 0)
    bench.send(live, 1)
    bench.outbox.end(live, End(FinishReason.LENGTH))
    await settle()
    assert [type(v) for v in bench.tokens.values] == [Tokens, Tokens]
    bench.tokens.ack(1)
    await settle()
    assert bench.usage.values == []  # 1. not all tokens are acked
    bench.tokens.ack(1)
    await settle()
    (usage,) = bench.usage.values
    assert isinstance(usage, Usage)
    assert (usage.output_tokens, usage.finish_reason) == (2, "length")
    assert len(bench.tokens.values) == 2  # 2. the usage row is not acked
    empty = [bench.outbox.is_empty]
    bench.usage.ack()
    await settle()
    completion = bench.tokens.values[2]
    assert isinstance(completion, Completion)
    assert (completion.output_tokens, completion.finish_reason, completion.message) == (2, "length", None)
    assert bench.tokens.sent[2][:2] == (topics.TOKENS, REPLY)
    empty.append(bench.outbox.is_empty)  # 3. the Completion is not acked
    bench.tokens.ack()
    await settle()
    assert [*empty, bench.outbox.is_empty] == [False, False, True]
    assert bench.errors == []


async def test_a_failure_of_tokens_leaves_no_usage_and_no_completion(bench: Bench) -> None:
    live = bench.take(1)
    bench.send(live, 0)
    bench.outbox.end(live, End(FinishReason.LENGTH))
    await settle()
    bench.tokens.sent[0][3].set_exception(KafkaError("gone"))
    await settle()
    assert [str(e) for e in bench.errors] == ["KafkaError: gone"]
    assert bench.usage.values == []
    assert len(bench.tokens.values) == 1


async def test_a_failure_of_usage_leaves_no_completion(bench: Bench) -> None:
    bench.outbox.end(bench.take(), End(FinishReason.ERROR, "too long"))
    await settle()
    bench.usage.sent[0][3].set_exception(KafkaError("gone"))
    await settle()
    assert len(bench.errors) == 1
    assert bench.tokens.values == []


async def test_a_failure_of_completion_is_fatal(bench: Bench) -> None:
    bench.outbox.end(bench.take(), End(FinishReason.ERROR, "too long"))
    await settle()
    bench.usage.ack()
    await settle()
    assert bench.tokens.values[0].message == "too long"
    bench.tokens.sent[0][3].set_exception(KafkaError("gone"))
    await settle()
    assert len(bench.errors) == 1


async def test_a_full_partition_is_blocked_until_half_is_acked(bench: Bench) -> None:
    live = bench.take()
    for position in range(MAX_RECORDS):
        assert bench.blocked == []
        bench.send(live, position)
    assert bench.blocked == [frozenset({REPLY})]
    await settle()
    bench.tokens.ack(MAX_RECORDS // 2 - 1)
    await settle()
    assert len(bench.blocked) == 1
    bench.tokens.ack(1)
    await settle()
    assert bench.blocked[1:] == [frozenset()]


async def test_a_full_buffer_of_the_producer_delays_a_record_and_loses_none(bench: Bench) -> None:
    live = bench.take()
    bench.tokens.refuse = [KafkaTimeoutError(), KafkaTimeoutError()]
    for position in range(3):
        bench.send(live, position)
    await settle()
    assert [t.chunks[0].position for t in bench.tokens.values] == [0, 1, 2]
    assert bench.errors == []


async def test_a_record_that_cannot_be_sent_stops_the_partition(bench: Bench) -> None:
    live = bench.take()
    bench.tokens.refuse = [KafkaError("fenced")]
    bench.send(live, 0)
    bench.send(live, 1)
    await settle()
    assert [str(e) for e in bench.errors] == ["KafkaError: fenced"]
    assert bench.tokens.values == []


async def test_signs_of_life_name_the_silent_where_nothing_else_is_under_way(bench: Bench) -> None:
    first, second = bench.take(3), bench.take(4)
    bench.outbox.send_signs_of_life([first, second])
    await settle()
    (record,) = bench.tokens.values
    assert [(c.request_id, c.position, c.token_ids) for c in record.chunks] == [
        (first.request.request_id, 3, []),
        (second.request.request_id, 4, []),
    ]
    bench.outbox.send_signs_of_life([first])
    await settle()
    assert len(bench.tokens.values) == 1


async def test_age_is_that_of_the_oldest_unacked_record(bench: Bench) -> None:
    assert bench.outbox.age(1e9) == 0.0
    bench.send(bench.take(), 0)
    assert bench.outbox.age(1e9) > 1e8


async def test_a_refusal_by_headers_bills_nothing(bench: Bench) -> None:
    bench.outbox.refuse(ReplyTo(b"x" * 16, 3, REPLY), "cannot be decoded")
    await settle()
    (completion,) = bench.tokens.values
    assert (completion.attempt, completion.finish_reason, completion.output_tokens) == (3, "error", 0)
    assert bench.usage.values == []


async def test_once_halted_it_hands_nothing_more_over(bench: Bench) -> None:
    live = bench.take(1)
    bench.send(live, 0)
    bench.outbox.end(live, End(FinishReason.LENGTH))
    await settle()
    bench.send(live, 1)  # queued, not handed over yet
    bench.outbox.halt()
    with pytest.raises(TimeoutError):
        await bench.outbox.settle(0.01)
    bench.tokens.ack(1)
    await bench.outbox.settle(1.0)
    await settle()
    assert [type(v) for v in bench.tokens.values] == [Tokens]
    assert bench.usage.values == []
    assert bench.errors == []


async def test_the_end_says_where_a_stop_string_cuts(bench: Bench) -> None:
    bench.outbox.end(bench.take(), End(FinishReason.STOP, text_length=7))
    await settle()
    bench.usage.ack()
    await settle()
    (completion,) = bench.tokens.values
    assert (completion.finish_reason, completion.text_length, completion.message) == ("stop", 7, None)
