"""Lines that ask for several choices: a request each, one answer for all."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.api.bodies import convert_body
from schemas.api.choices import choice_request_id
from schemas.api.completions import CompletionBody
from schemas.api.prepare import prepare_choices
from schemas.codec import decode, encode
from schemas.records import BatchRequest, BatchResult, InferenceRequest, Left
from streams.ledger.batch import STOP_MS
from streams.ledger.batch_actions import FileAnswer
from streams.ledger.batch_item import BatchItem, FileSource, make_item
from streams.ledger.batch_outcome import CANCELLED
from streams.ledger.batch_records import parse
from streams.ledger.file_lines import item_request_id
from streams.ledger.job_feeding import Unserved
from tests.batch_world import MODELS, WORKER, World, completion, dispatched, rejected, tokens

JOB = "batch_" + "0" * 32
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}


def file_line(n: int = 3, index: int = 0, url: str = CHAT, **body: Any) -> BatchItem:
    source = FileSource("demo", JOB, index, f"n{index}")
    asked = {"model": "simulated", "n": n, "max_tokens": 4, **(USER if url == CHAT else {}), **body}
    return make_item(source, item_request_id(JOB, index), 0, url, asked, MODELS, None, 3_600_000)


def topic_line(offset: int = 0, n: int = 2) -> BatchItem:
    body = {"model": "simulated", "n": n, "max_tokens": 4, **USER}
    line = json.dumps({"custom_id": "a", "url": CHAT, "body": body}).encode()
    item = parse(line, "demo", offset, 0, MODELS)
    assert isinstance(item, BatchItem), item
    return item


def run(world: World, request: InferenceRequest, text: str) -> None:
    world.say(dispatched(request), tokens(request, 0, text), completion(request, len(text)))


def ended(world: World) -> tuple[FileAnswer, Any]:
    (answer,) = world.shard.answers.file
    assert world.shard.open == 0
    return answer, json.loads(answer.line)


def texts(body: Any) -> list[str]:
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return [choice["message"]["content"] for choice in body["choices"]]


def test_each_choice_is_a_request_and_all_make_one_answer() -> None:
    world = World()
    world.accept(file_line())
    requests = world.requests
    line_id = item_request_id(JOB, 0)
    assert [r.request_id for r in requests] == [choice_request_id(line_id, i) for i in range(3)]
    assert len({r.sampling.seed for r in requests}) == 3
    run(world, requests[2], "cc")
    run(world, requests[0], "a")
    assert not world.shard.answers.file
    assert not world.shard.answers.ended
    run(world, requests[1], "bbb")
    answer, line = ended(world)
    assert (line["custom_id"], line["response"]["request_id"]) == ("n0", line_id.hex())
    body = line["response"]["body"]
    assert texts(body) == ["a", "bbb", "cc"]
    prompt = len(requests[0].prompt_token_ids)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3 * prompt, 6)
    assert (answer.output_tokens, answer.sent, world.shard.answers.ended) == (6, 3, {JOB: 3})
    assert [seal.request_id for seal in answer.seals] == [r.request_id for r in requests]
    assert [seal.output_tokens for seal in answer.seals] == [1, 3, 2]


@pytest.mark.parametrize("seed", [7, None])
def test_prompts_times_n_have_the_seeds_that_they_have_online(seed: int | None) -> None:
    item = file_line(2, url=COMPLETIONS, prompt=["one", "other"], **({} if seed is None else {"seed": seed}))
    choices = item.requests()
    assert item.num_requests == len(choices) == 4
    asked = {"model": "simulated", "n": 2, "max_tokens": 4, "prompt": ["one", "other"], "seed": seed}
    online = prepare_choices(convert_body(asked, CompletionBody), MODELS)
    assert [c.prompt_token_ids for c in choices] == [c.prompt_token_ids for c in online]
    seeds = [c.sampling.seed for c in choices]
    if seed is None:
        assert len(set(seeds)) == 4
        assert seeds == [
            c.sampling.seed for c in file_line(2, url=COMPLETIONS, prompt=["one", "other"]).requests()
        ]
    else:
        assert seeds == [c.sampling.seed for c in online]
    assert item.num_tokens == sum(len(c.prompt_token_ids) + 4 for c in choices)
    unserved = Unserved()
    unserved.add(item)
    assert (unserved.unread, unserved.tokens) == (4, {"simulated": item.num_tokens})


def test_a_line_with_one_choice_is_one_request() -> None:
    item = file_line(1)
    assert item.requests() == [item]


def test_a_choice_refused_before_any_ran_refuses_the_line_for_nothing() -> None:
    world = World()
    world.accept(file_line(2))
    first, second = world.requests
    run(world, first, "ab")
    world.say(rejected(second, 400, "too_much"))
    answer, line = ended(world)
    assert (line["response"]["status_code"], answer.code) == (400, "too_much")
    assert (answer.input_tokens, answer.output_tokens) == (0, 0)
    (seal,) = answer.seals
    assert (seal.request_id, seal.sealed, seal.input_tokens, seal.output_tokens) == (
        first.request_id,
        True,
        0,
        0,
    )


def test_a_choice_that_fails_stops_the_others_and_what_ran_is_billed() -> None:
    world = World()
    world.accept(file_line(2))
    first, second = world.requests
    world.say(dispatched(first), tokens(first, 0, "ab"))
    for _ in range(4):
        request = [r for r in world.requests if r.request_id == second.request_id][-1]
        world.say(dispatched(request), completion(request, 0, "error"))
    assert [c.request_id for c in world.cancelled] == [first.request_id]
    assert not world.shard.answers.file
    world.say(completion(first, 2, "cancelled"))
    answer, line = ended(world)
    assert line["error"]["code"] == "worker_lost"
    assert (answer.output_tokens, len(answer.seals)) == (2, 2)


def test_a_job_that_is_cancelled_bills_what_ran() -> None:
    world = World()
    world.accept(file_line(2))
    first, second = world.requests
    run(world, first, "ab")
    world.do(world.shard.cancel(JOB, CANCELLED, world.now))
    assert [c.request_id for c in world.cancelled] == [second.request_id]
    world.fleet.on_event(Left("worker", 0, WORKER, "killed"), WORKER + 1)
    world.tick(STOP_MS)
    answer, line = ended(world)
    assert (line["error"]["code"], answer.output_tokens, len(answer.seals)) == ("batch_cancelled", 2, 1)


def test_a_producers_retry_while_some_have_ended_and_after_all_have() -> None:
    world = World()
    world.accept(topic_line())
    first, second = world.requests
    run(world, first, "ab")
    assert world.shard.has(first.request_id)
    world.accept(topic_line(offset=1))
    run(world, second, "cd")
    world.accept(topic_line(offset=2))
    assert len(world.requests) == 2
    assert [answer.source.offset for answer in world.shard.answers.topic] == [0, 1, 2]
    assert [texts(answer["response"]["body"]) for answer in world.answers()] == [["ab", "cd"]] * 3


def test_in_avro_as_in_json() -> None:
    record = BatchRequest("a", json.dumps({"model": "simulated", "n": 2, **USER}), url=CHAT)
    item = parse(encode(record), "demo", 0, 0, MODELS)
    assert isinstance(item, BatchItem)
    world = World()
    world.accept(item)
    for request, text in zip(world.requests, ("ab", "c"), strict=True):
        run(world, request, text)
    (answer,) = world.shard.answers.topic
    result = decode(answer.value)
    assert isinstance(result, BatchResult)
    assert result.body is not None
    assert texts(json.loads(result.body)) == ["ab", "c"]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_however_choices_end_and_owners_die_each_line_has_one_answer(seed: int) -> None:
    """`waiting`: how much the workers have said of each choice, in the order that they do."""
    rng = random.Random(seed)
    lines = [file_line(rng.randint(1, 4), index) for index in range(2)]
    want = {c.request_id: f"{i}{k}" for i, line in enumerate(lines) for k, c in enumerate(line.requests())}
    world = World()
    for line in lines:
        world.accept(line)
    waiting = {r.request_id: 0 for r in world.requests}
    assert waiting.keys() == want.keys()
    answers: dict[int, FileAnswer] = {}

    def collect() -> None:
        for answer in world.shard.answers.take_file():
            known = answers.setdefault(answer.source.index, answer)
            assert known == answer  # not committed: an owner after it says the same again

    while waiting:
        if rng.random() < 0.25:
            collect()
            world = World(world.log, world.shard.resume_offset, world.epoch + 1)
            world.do(world.shard.claims())
            world.read_back()
            for line in rng.sample(lines, 2):
                world.accept(line)
            # What was sent and not taken is sent again; what has ended is not.
            assert {r.request_id for r in world.requests} <= {
                rid for rid, step in waiting.items() if step == 0
            }
            continue
        rid = rng.choice(sorted(waiting))
        request = InferenceRequest(
            rid, 1, "demo", 2, "simulated", [], [], lines[0].sampling, 2, world.epoch, 0, 0
        )
        step = waiting[rid]
        said = (dispatched(request), tokens(request, 0, want[rid]), completion(request, 2))
        world.say(said[step])
        waiting[rid] += 1
        if step == 2:
            del waiting[rid]
    collect()
    assert sorted(answers) == [0, 1]
    for index, answer in answers.items():
        body = json.loads(answer.line)["response"]["body"]
        assert texts(body) == [want[c.request_id] for c in lines[index].requests()]
        assert len(answer.seals) == (lines[index].num_requests if lines[index].num_requests > 1 else 0)
    world.shard.answers.release(line.request_id for line in lines)
    assert world.shard.resume_offset == len(world.log)


def test_a_line_that_failed_while_its_owner_died_ends_so_in_the_next_life() -> None:
    item = file_line(2)
    first = World()
    first.accept(item)
    one, two = first.requests
    first.say(dispatched(one), tokens(one, 0, "ab"), rejected(two, 400, "too_much"))
    assert [c.request_id for c in first.cancelled] == [one.request_id]
    second = World([*first.log, completion(one, 2, "cancelled")], first.shard.resume_offset, first.epoch + 1)
    second.do(second.shard.claims())
    second.accept(item)
    second.tick(STOP_MS)
    answer, line = ended(second)
    assert (line["response"]["status_code"], answer.code, answer.output_tokens) == (400, "too_much", 0)
    assert not second.requests


def test_a_choice_too_large_for_the_log_ends_the_line() -> None:
    world = World()
    world.accept(file_line(2))
    world.shard.on_too_large(world.requests[1].request_id, 1)
    world.tick()
    world.say(rejected(world.requests[0], 503, "expired"))
    answer, line = ended(world)
    assert (line["response"]["status_code"], answer.code, answer.seals) == (413, "request_too_large", [])
