"""The owner's decisions about batch requests."""

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import (
    Admitted,
    Claim,
    Failed,
    Left,
    Retry,
    Tokens,
)
from schemas.token_records import TokenChunk
from streams.ledger.batch import SILENCE_MS
from streams.ledger.batch_actions import AdmissionOffsets
from streams.ledger.batch_recovery import RECOVERED_MS
from streams.ledger.owner_word import MAX_RETRIES
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


def test_a_request_and_its_answer() -> None:
    world = World()
    world.accept(make_item())
    request = world.last
    assert (request.priority, request.reply_partition, request.owner_epoch, request.end_ms) == (
        2, P, EPOCH, END_MS,
    )  # fmt: skip
    world.say(dispatched(request), tokens(request, 0, "ab"), tokens(request, 2, "cd"), completion(request, 4))
    (answer,) = world.answers()
    assert (answer["text"], answer["usage"]["output_tokens"]) == ("abcd", 4)
    assert world.shard.answers.topic[0].seals == []
    assert world.shard.open == 0
    assert world.shard.resume_offset == len(world.log)


def test_an_answer_ends_before_the_stop_string_that_ended_it() -> None:
    world = World()
    world.accept(make_item())
    request = world.last
    cut = completion(request, 6, "stop")
    cut.text_length, cut.cached_tokens = 2, 3
    world.say(dispatched(request), tokens(request, 0, "abSTOP"), cut)
    (answer,) = world.answers()
    assert answer["text"] == "ab"
    assert answer["usage"] == {"input_tokens": 3, "cached_tokens": 3, "output_tokens": 6}


def test_the_same_request_twice_runs_once_and_is_answered_twice() -> None:
    world = World()
    world.accept(make_item(offset=0))
    world.accept(make_item(offset=1))
    request = world.last
    world.say(dispatched(request), completion(request, 0))
    world.accept(make_item(offset=2))
    assert len(world.requests) == 1
    assert [answer.source.offset for answer in world.shard.answers.topic] == [0, 1, 2]


@pytest.mark.parametrize("status", [429, 503])
def test_refused_for_now_goes_out_again_as_the_same_attempt(status: int) -> None:
    world = World()
    world.accept(make_item())
    world.say(rejected(world.last, status, after=5_000))
    world.tick(4_900)
    assert len(world.requests) == 1
    world.tick(200)
    assert [r.attempt for r in world.requests] == [1, 1]
    world.say(rejected(world.last, status))
    waits = []
    for _ in range(3):
        sent = len(world.requests)
        began = world.now
        while len(world.requests) == sent:
            world.tick(100)
        waits.append(world.now - began)
        world.say(rejected(world.last, status))
    assert waits == [2_000, 4_000, 8_000]
    world.tick(60_000)
    request = world.last
    world.say(dispatched(request), tokens(request, 0, "x"), completion(request, 1))
    assert world.answers()[0]["text"] == "x"


@pytest.mark.parametrize(
    ("status", "code", "want"),
    [
        (400, "tokens_per_minute_exceeded", None),
        (403, "tenant_disabled", None),
        (503, "expired", "batch_expired"),
    ],
)
def test_refused_for_good_is_an_answer(status: int, code: str, want: str | None) -> None:
    world = World()
    world.accept(make_item())
    world.say(rejected(world.last, status, code))
    assert world.answers()[0]["error"]["code"] == (want or code)
    assert world.shard.answers.topic[0].seals == []


def test_a_lost_worker_is_retried_from_where_it_was() -> None:
    world = World()
    world.accept(make_item())
    first = world.last
    world.say(dispatched(first), tokens(first, 0, "ab"))
    world.fleet.on_event(Left("worker", 0, WORKER, "killed"), WORKER + 1)
    world.tick()
    second = world.last
    assert (second.attempt, second.output_token_ids) == (2, [97, 98])
    assert second.accepted_at == first.accepted_at
    world.say(dispatched(second, WORKER + 2), tokens(second, 2, "cd", WORKER + 2))
    world.say(completion(second, 4, epoch=WORKER + 2))
    assert world.answers()[0]["text"] == "abcd"


def test_a_completion_that_came_first_wins_over_the_retry() -> None:
    world = World()
    world.accept(make_item())
    first = world.last
    world.say(dispatched(first), tokens(first, 0, "ab"))
    world.fleet.on_event(Left("worker", 0, WORKER, "stopped"), WORKER + 1)
    actions = world.shard.tick(world.now, world.fleet, {})
    world.log.append(completion(first, 2))
    world.do(actions)
    world.read_back()
    assert len(world.requests) == 1
    assert world.answers()[0]["text"] == "ab"


def test_silence_is_judged_on_the_logs_clock_alone() -> None:
    world = World()
    world.accept(make_item())
    world.say(dispatched(world.last))
    world.now += 100 * SILENCE_MS  # the machine slept; the log did not move
    world.tick()
    assert len(world.requests) == 1
    for _ in range(SILENCE_MS // 1000 - 1):
        world.tick(1000)
        world.say(Tokens.of(0, WORKER, [TokenChunk(world.last.request_id, 1, 0, [])]))  # "I am here"
    assert len(world.requests) == 1
    world.tick(SILENCE_MS + 200)
    assert world.last.attempt == 2


def test_a_gap_and_an_error_are_retried() -> None:
    world = World()
    world.accept(make_item())
    world.say(dispatched(world.last), tokens(world.last, 0, "a"), tokens(world.last, 2, "c"))
    assert (world.last.attempt, world.last.output_token_ids) == (2, [97])
    world.say(dispatched(world.last), completion(world.last, 1, "error"))
    assert world.last.attempt == 3


def test_it_gives_up_and_seals_the_bill() -> None:
    world = World()
    world.accept(make_item())
    for attempt in range(1, MAX_RETRIES + 2):
        request = world.last
        assert request.attempt == attempt
        world.say(
            dispatched(request), tokens(request, attempt - 1, "x"), completion(request, attempt, "error")
        )
    assert isinstance(world.log[-1], Failed)
    assert world.answers()[0]["error"]["code"] == "worker_lost"
    (seal,) = world.shard.answers.topic[0].seals
    assert (seal.attempt, seal.sealed, seal.output_tokens, seal.input_tokens) == (4, True, 4, 3)


def test_a_stray_is_cancelled_and_the_bill_sealed() -> None:
    world = World()
    world.accept(make_item())
    request = world.last
    world.say(dispatched(request), tokens(request, 0, "no", epoch=99), tokens(request, 0, "a"))
    world.say(tokens(request, 2, "no", epoch=99), completion(request, 1))
    assert [(c.slot, c.epoch) for c in world.cancelled] == [(0, 99)]
    assert world.answers()[0]["text"] == "a"
    (seal,) = world.shard.answers.topic[0].seals
    assert (seal.sealed, seal.output_tokens, seal.finish_reason) == (True, 1, "length")


def test_what_lies_below_a_takeover_is_sent_again() -> None:
    world = World()
    world.accept(make_item("a"))
    world.accept(make_item("b", offset=1))
    world.say(Admitted(world.requests[0].request_id, 1, EPOCH, P, 0), dispatched(world.requests[1]))
    world.admission = {P: AdmissionOffsets(takeover=2, read=2)}
    world.tick()
    assert [r.request_id for r in world.requests[2:]] == [world.requests[0].request_id]
    assert world.last.attempt == 1
    # It lies above now, and was admitted: nothing is sent again.
    world.say(Admitted(world.last.request_id, 1, EPOCH, P, 2))
    world.admission = {P: AdmissionOffsets(takeover=2, read=3)}
    world.tick(2_000)
    world.tick(2_000)
    assert len(world.requests) == 3


def test_read_and_not_answered_is_sent_again_three_times_then_backs_off() -> None:
    world = World()
    world.accept(make_item())
    sent_at = [0]
    for _ in range(100):
        world.admission = {P: AdmissionOffsets(takeover=0, read=len(world.requests))}
        before = len(world.requests)
        world.tick(100)
        if len(world.requests) > before:
            sent_at.append(world.now)
    gaps = [b - a for a, b in itertools.pairwise(sent_at)]
    assert gaps[:3] == [1_100, 1_100, 1_100]
    assert gaps[3] >= 2_000


def test_it_waits_no_longer_than_a_minute_and_until_its_tenant_is_changed() -> None:
    world = World()
    world.accept(make_item())
    world.say(rejected(world.last, 429, after=30 * 86_400_000))
    sent = len(world.requests)
    world.tick(59_000)
    assert len(world.requests) == sent
    world.tick(1_000)
    assert len(world.requests) == sent + 1
    world.say(rejected(world.last, 429, after=30 * 86_400_000))
    world.shard.rules_changed({"others"}, world.now)
    world.tick(2_000)
    assert len(world.requests) == sent + 1
    world.shard.rules_changed({world.last.tenant}, world.now)
    world.tick(1_999)
    assert len(world.requests) == sent + 1
    assert world.shard.refused_until == {world.last.tenant: world.now + 1}
    world.tick(1)
    assert len(world.requests) == sent + 2


def test_it_expires() -> None:
    world = World()
    world.accept(make_item())
    world.say(rejected(world.last, 429))
    world.now = END_MS
    world.tick()
    assert world.answers()[0]["error"]["code"] == "batch_expired"


def test_a_successor_claims_and_goes_on() -> None:
    first = World()
    for offset, name in enumerate("abcd"):
        first.accept(make_item(name, offset))
    a, b, c, d = first.requests
    first.say(dispatched(a), tokens(a, 0, "ab"), completion(a, 2))
    first.say(dispatched(b), tokens(b, 0, "x"), rejected(c, 429))
    first.say(dispatched(d), tokens(d, 0, "zz"), Retry(d.request_id, 2, EPOCH, "lost"))

    second = World(first.log, resume=0, epoch=EPOCH + 1)
    second.do(second.shard.claims())
    second.read_back()
    assert isinstance(first.log[-1], Claim)
    for offset, name in enumerate("abcd"):
        second.accept(make_item(name, offset))
    # a is answered at once, b awaited, c and the unsent attempt of d sent.
    assert [answer["text"] for answer in second.answers()] == ["ab"]
    assert [(r.request_id, r.attempt, r.output_token_ids) for r in second.requests] == [
        (c.request_id, 1, []),
        (d.request_id, 2, [122, 122]),
    ]
    # The old owner's word counts no more, the new one's does.
    second.say(Retry(b.request_id, 2, EPOCH, "zombie"))
    assert len(second.requests) == 2
    second.fleet.on_event(Left("worker", 0, WORKER, "killed"), WORKER + 1)
    second.tick()
    assert (second.last.request_id, second.last.attempt) == (b.request_id, 2)
    assert second.shard.resume_offset <= first.log.index(first.log[3])


def test_a_request_named_by_the_old_owner_after_the_claim_is_claimed_alone() -> None:
    first = World()
    first.accept(make_item())
    request = first.last
    second = World(first.log, epoch=EPOCH + 1)
    second.do(second.shard.claims())
    second.accept(make_item())
    second.say(dispatched(request))  # names the old owner
    second.fleet.on_event(Left("worker", 0, WORKER, "killed"), WORKER + 1)
    second.tick()
    assert [type(record) for record in first.log[-2:]] == [Claim, Retry]
    assert second.last.attempt == 2


def test_what_an_earlier_life_sent_runs_before_this_one_reads_it() -> None:
    first = World()
    first.accept(make_item())
    request = first.last
    second = World(first.log, epoch=EPOCH + 1)
    second.do(second.shard.claims())
    # Admission had not had it yet when this life began.
    second.say(dispatched(request), tokens(request, 0, "ab"))
    second.accept(make_item())
    second.say(tokens(request, 2, "cd"), completion(request, 4))
    assert second.answers()[0]["text"] == "abcd"
    assert second.requests == []
    third = World(first.log, epoch=EPOCH + 2)
    third.accept(make_item())
    assert third.answers()[0]["text"] == "abcd"


def test_records_of_what_has_ended_here_are_not_kept() -> None:
    world = World()
    world.accept(make_item())
    request = world.last
    world.say(dispatched(request), completion(request, 0))
    world.say(dispatched(request), tokens(request, 0, "x"))
    assert not world.shard.recovery


def test_records_of_others_are_kept_for_a_while() -> None:
    world = World()
    for offset in range(2):
        world.say(Tokens.of(0, 1, [TokenChunk(b"x" * 16, 1, 0, [1])]))
        assert len(world.shard.recovery) == 1 - offset
        world.now += RECOVERED_MS
        world.tick(100)
        assert not world.shard.recovery


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), crashes=st.integers(0, 3))
def test_whatever_happens_each_is_answered_once_with_the_right_text(seed: int, crashes: int) -> None:
    """A random world: workers die, admission refuses, owners crash and come back from what they committed."""
    rng = random.Random(seed)
    count = rng.randrange(1, 6)
    items = [make_item(f"n{i}", i, max_tokens=rng.randrange(1, 6)) for i in range(count)]
    log: list[Any] = []
    world, answered, lives = World(log), {}, 0
    committed_resume = 0
    running: dict[tuple[bytes, int], int] = {}
    seen = 0
    for item in items:
        world.accept(item)
    for _ in range(600):
        for request in world.requests[seen:]:
            key = (request.request_id, request.attempt)
            if key in running:
                continue  # admission knows it
            if rng.random() < 0.3:
                world.say(rejected(request, 429, after=100))
            else:
                running[key] = len(request.output_token_ids)
                if rng.random() < 0.7:
                    world.say(dispatched(request))
        seen = len(world.requests)
        for request in list(world.requests):
            key = (request.request_id, request.attempt)
            position = running.get(key)
            if position is None or position < 0 or rng.random() < 0.5:
                continue
            if position == request.sampling.max_tokens:
                world.say(completion(request, position))
                running[key] = -1
            elif rng.random() < 0.1 and request.attempt <= 3:
                world.say(completion(request, position, "error"))
                running[key] = -1
            else:
                world.say(tokens(request, position, chr(97 + position)))
                running[key] = position + 1
        world.tick(500)
        if rng.random() < 0.3:  # a flush
            for answer in world.shard.answers.topic:
                assert answer.source.offset not in answered
                answered[answer.source.offset] = json.loads(answer.value)
            world.shard.answers.topic.clear()
            committed_resume = world.shard.resume_offset
        if lives < crashes and rng.random() < 0.02:
            lives += 1
            old = world
            world = World(log, committed_resume, EPOCH + lives)
            world.requests, world.now = old.requests, old.now
            world.do(world.shard.claims())
            world.read_back()
            for offset, item in enumerate(items):
                if offset not in answered:
                    world.accept(item)
        if len(answered) == count:
            break
    assert sorted(answered) == list(range(count)), running
    for offset, item in enumerate(items):
        answer = answered[offset]
        if answer["error"] is None:
            assert answer["text"] == "abcdef"[: item.sampling.max_tokens]
