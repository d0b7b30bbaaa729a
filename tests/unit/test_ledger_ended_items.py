"""How a batch request ends when a run, or the log, does not do as its answer says."""

import asyncio
from dataclasses import replace

import pytest
from aiokafka.errors import MessageSizeTooLargeError

from schemas.records import Failed
from streams.ledger.batch import EXPIRY_GRACE_MS
from streams.ledger.batch_actions import SendRequest
from streams.ledger.batch_sender import BatchSender
from streams.ledger.billing import version
from streams.ledger.ended_items import KEPT_MS
from tests.batch_world import (
    END_MS,
    EPOCH,
    WORKER,
    P,
    World,
    completion,
    dispatched,
    make_item,
    rejected,
    tokens,
)
from tests.hand_producer import HandProducer, settle


@pytest.mark.parametrize("first", ["tokens", "dispatched"])
def test_a_second_run_that_shows_only_behind_the_end_is_stopped_and_changes_nothing_of_the_bill(
    first: str,
) -> None:
    world = World()
    world.accept(make_item())
    request = world.last
    world.say(dispatched(request), tokens(request, 0, "a"), completion(request, 1))
    assert world.shard.answers.topic[0].seals == []
    world.say(tokens(request, 0, "a"))  # of the run that ended it
    assert (world.cancelled, world.seals) == ([], [])
    world.say(dispatched(request, epoch=99) if first == "dispatched" else tokens(request, 0, "ab", epoch=99))
    world.say(tokens(request, 2, "cd", epoch=99), completion(request, 4, epoch=99))
    assert [(c.slot, c.epoch, c.attempt) for c in world.cancelled] == [(0, 99, 1)]
    (seal,) = world.seals
    assert (seal.sealed, seal.attempt, seal.epoch) == (True, 1, WORKER)
    assert (seal.input_tokens, seal.output_tokens, seal.finish_reason) == (3, 1, "length")
    assert version(seal) > version(replace(seal, sealed=False, output_tokens=4, epoch=99))
    assert [answer["text"] for answer in world.answers()] == ["a"]
    world.tick(KEPT_MS)
    world.say(tokens(request, 4, "e", epoch=77))
    assert len(world.cancelled) == len(world.seals) == 1


def test_a_late_run_of_an_earlier_attempt_or_of_what_was_refused_is_stopped_alone() -> None:
    world = World()
    world.accept(make_item())
    first = world.last
    world.say(dispatched(first), completion(first, 0, "error"))
    second = world.last
    assert second.attempt == 2
    world.say(dispatched(second), tokens(second, 0, "a"), completion(second, 1))
    world.say(tokens(first, 0, "x", epoch=98))
    assert [(c.epoch, c.attempt) for c in world.cancelled] == [(98, 1)]
    world.accept(make_item("b", offset=1))
    world.say(rejected(world.last, 400), dispatched(world.last))
    assert [(c.epoch, c.attempt) for c in world.cancelled[1:]] == [(WORKER, 1)]
    (seal,) = world.seals  # it was told that it costs nothing
    assert (seal.request_id, seal.output_tokens) == (world.last.request_id, 0)


EXPIRES_MS = END_MS + EXPIRY_GRACE_MS


def test_a_run_behind_batch_expired_is_stopped_and_costs_nothing() -> None:
    world = World()
    world.accept(make_item())
    request = world.last
    world.tick()
    world.now += EXPIRES_MS
    world.tick()
    assert [answer["error"]["code"] for answer in world.answers()] == ["batch_expired"]
    assert world.shard.answers.topic[0].seals == []
    # Whatever folds the log knows that it has ended, and what still has it is to let it go.
    assert isinstance(world.log[-1], Failed)
    assert world.log[-1].code == "batch_expired"
    assert [(c.attempt, c.slot, c.reason) for c in world.cancelled] == [(1, None, "batch_expired")]
    world.say(dispatched(request), tokens(request, 0, "ab"), completion(request, 2, "cancelled"))
    assert [(c.attempt, c.epoch) for c in world.cancelled[1:]] == [(1, WORKER)]
    (seal,) = world.seals
    assert (seal.sealed, seal.attempt, seal.finish_reason) == (True, 1, "error")
    assert (seal.input_tokens, seal.cached_tokens, seal.output_tokens) == (0, 0, 0)
    assert version(seal) > version(replace(seal, sealed=False, input_tokens=3, output_tokens=2))


def test_a_run_that_shows_by_its_end_alone_costs_nothing_either() -> None:
    world = World()
    world.accept(make_item())
    world.say(rejected(world.last, 403), completion(world.last, 0, "cancelled"))
    assert world.cancelled == []  # it is over
    assert [(seal.input_tokens, seal.output_tokens) for seal in world.seals] == [(0, 0)]


@pytest.mark.parametrize("ends", [False, True])
def test_what_lies_before_the_word_that_it_expired_is_answered_and_billed(ends: bool) -> None:
    world = World()
    world.accept(make_item())
    request = world.last
    world.tick()
    world.now += EXPIRES_MS
    said = world.shard.tick(world.now, world.fleet, {})
    world.log += [dispatched(request), tokens(request, 0, "ab")] + ([completion(request, 2)] if ends else [])
    world.do(said)
    world.read_back()
    (answer,) = world.answers()
    seals = world.shard.answers.topic[0].seals
    if ends:
        assert (answer["text"], seals) == ("ab", [])
        return
    assert (answer["error"]["code"], answer["usage"]["output_tokens"]) == ("batch_expired", 2)
    (seal,) = seals
    assert (seal.sealed, seal.input_tokens, seal.output_tokens) == (True, 3, 2)


def test_a_request_too_large_for_the_log_is_answered_as_that() -> None:
    world = World()
    world.accept(make_item())
    world.shard.on_too_large(world.last.request_id, 2)  # of another attempt
    world.tick()
    assert world.answers() == []
    world.shard.on_too_large(world.last.request_id, 1)
    world.tick()
    (answer,) = world.answers()
    assert answer["error"]["code"] == "request_too_large"
    assert answer["error"]["message"].startswith("prompt: ")
    assert world.shard.open == 0


@pytest.mark.parametrize("by_broker", [False, True])
async def test_a_request_that_its_topic_refuses_for_its_size_ends_no_shard(by_broker: bool) -> None:
    world, producer, refused = World(), HandProducer(), list[tuple[bytes, int]]()
    sender = BatchSender(producer, P, 4, lambda *sent: None, lambda *which: refused.append(which))
    world.accept(make_item())
    too_large = MessageSizeTooLargeError()
    producer.refuse = [] if by_broker else [too_large]
    await sender.execute([SendRequest(world.last)])
    if by_broker:
        producer.sent[0][3].set_exception(too_large)
        await settle()
    assert refused == [(world.last.request_id, 1)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sender.watch(), 0.01)


def test_a_run_that_began_before_a_restart_is_billed_though_it_told_no_token() -> None:
    first = World()
    first.accept(make_item())
    failed = Failed(first.last.request_id, 1, EPOCH, "worker_lost", "gave up")
    first.log += [dispatched(first.last), failed]
    second = World(first.log, 0, EPOCH + 1)
    second.accept(make_item())
    (seal,) = second.shard.answers.topic[0].seals
    assert (seal.input_tokens, seal.output_tokens) == (3, 0)
