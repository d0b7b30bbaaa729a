"""What a batch answers with is what the API of the line would have answered with."""

import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.records import Tokens
from schemas.sampling import TokenLogprobs
from schemas.token_records import TokenChunk
from streams.ledger.batch_item import BatchItem
from streams.ledger.batch_records import parse
from tests.batch_world import MODELS, WORKER, World, completion, dispatched, rejected, tokens

USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


def make_line(url: str, body: dict[str, Any]) -> BatchItem:
    line = {"custom_id": "a", "url": url, "body": {"model": "simulated", **body}}
    item = parse(json.dumps(line).encode(), "demo", 0, 0, MODELS)
    assert isinstance(item, BatchItem), item
    return item


def answer_of(world: World) -> Any:
    (answer,) = world.answers()
    assert answer["response"]["status_code"] == 200
    return answer["response"]["body"]


def run(url: str, body: dict[str, Any], text: str, *, has_tools: bool = False) -> Any:
    world = World()
    world.accept(replace(make_line(url, body), has_tools=has_tools))
    request = world.last
    world.say(dispatched(request), tokens(request, 0, text), completion(request, len(text)))
    return answer_of(world)


def test_calls_of_tools() -> None:
    chat = run("/v1/chat/completions", {"messages": USER}, CALL, has_tools=True)
    (call,) = chat["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": 1}'}
    message = run("/v1/messages", {"messages": USER, "max_tokens": 99}, CALL, has_tools=True)
    assert [(block["type"], block["input"]) for block in message["content"]] == [("tool_use", {"at": 1})]


def test_messages_and_responses() -> None:
    message = run("/v1/messages", {"messages": USER, "max_tokens": 2}, "ab")
    assert (message["type"], message["stop_reason"]) == ("message", "max_tokens")
    assert message["content"] == [{"type": "text", "text": "ab"}]
    response = run("/v1/responses", {"input": "hi", "max_output_tokens": 2}, "ab")
    assert (response["object"], response["status"], response["store"]) == ("response", "incomplete", False)
    assert response["output"][0]["content"][0]["text"] == "ab"
    assert response["usage"]["output_tokens"] == 2


def test_the_stop_sequence_is_named() -> None:
    world = World()
    world.accept(make_line("/v1/messages", {"messages": USER, "max_tokens": 9, "stop_sequences": ["##"]}))
    request = world.last
    cut = completion(request, 4, "stop")
    cut.text_length = 2
    world.say(dispatched(request), tokens(request, 0, "ab##"), cut)
    assert answer_of(world)["stop_sequence"] == "##"


def told(request: Any, position: int, text: str) -> Tokens:
    logprobs = [TokenLogprobs(-0.5, [ord(c)], [-0.5]) for c in text]
    ids = list(text.encode())
    chunk = TokenChunk(request.request_id, request.attempt, position, ids, logprobs=logprobs)
    return Tokens.of(0, WORKER, [chunk])


@pytest.mark.parametrize("restart", [False, True])
def test_log_probabilities_of_all_attempts_and_lives(restart: bool) -> None:
    item = make_line("/v1/completions", {"prompt": "hi", "logprobs": 1, "max_tokens": 4})
    world = World()
    world.accept(item)
    first = world.last
    world.say(dispatched(first), told(first, 0, "ab"), told(first, 1, "bc"), completion(first, 3, "error"))
    if restart:
        world = World(world.log, epoch=world.epoch + 1)
        world.do(world.shard.claims())
        world.accept(item)
    again = world.last
    assert (again.attempt, again.output_token_ids) == (2, list(b"abc"))
    world.say(dispatched(again), told(again, 3, "d"), completion(again, 4))
    logprobs = answer_of(world)["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (list("abcd"), [-0.5] * 4)


def test_responses_list_them_as_chat_does() -> None:
    world = World()
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "max_output_tokens": 1}
    world.accept(make_line("/v1/responses", body))
    world.say(dispatched(world.last), told(world.last, 0, "x"), completion(world.last, 1))
    (entry,) = answer_of(world)["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"]) == ("x", -0.5)


def test_a_refusal_by_admission_is_a_response_with_its_status() -> None:
    world = World()
    world.accept(make_line("/v1/messages", {"messages": USER, "max_tokens": 2}))
    world.say(rejected(world.last, 400, "tokens_per_minute_exceeded"))
    (answer,) = world.answers()
    assert answer["response"]["status_code"] == 400
