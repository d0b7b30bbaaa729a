"""The official OpenAI client's `responses` against the real stack and the real model."""

import json
import time
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.e2e.conftest import RunningStack


@pytest.fixture
def client(gemma_stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gemma_stack.stack.url()}/v1", api_key=gemma_stack.api_key, max_retries=0)


@pytest.fixture
def asked(gemma_stack: RunningStack) -> dict[str, Any]:
    return {"model": gemma_stack.model, "input": "Say a word.", "max_output_tokens": 12, "temperature": 0}


def ended(client: openai.OpenAI, name: str) -> Response:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        response = client.responses.retrieve(name)
        if response.status not in ("queued", "in_progress"):
            return response
        time.sleep(0.1)
    raise AssertionError(f"{name} does not end")


def test_whole_and_streamed_say_the_same(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    with client:
        whole = client.responses.create(**asked, metadata={"k": "v"}, instructions="Be brief.")
        with client.responses.stream(**asked, instructions="Be brief.") as stream:
            events = list(stream)
    final = events[-1].response  # type: ignore[union-attr]
    assert whole.output_text == final.output_text != ""
    assert whole.usage is not None
    assert final.usage is not None
    assert whole.usage.output_tokens == final.usage.output_tokens
    assert whole.usage.total_tokens == final.usage.total_tokens
    assert 0 < whole.usage.output_tokens <= 12
    assert whole.metadata == {"k": "v"}
    assert whole.status == final.status
    if whole.status == "incomplete":
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))


def test_an_answer_is_sent_back_in_the_next_input(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    with client:
        first = client.responses.create(**asked)
        again = [
            {"role": "user", "content": "Say a word."},
            *first.output,
            {"role": "user", "content": "Go on."},
        ]
        second = client.responses.create(**{**asked, "input": again})
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_structured_output_and_log_probabilities(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    form: Any = {"type": "json_schema", "name": "n", "schema": {**schema, "additionalProperties": False}}
    with client:
        long = {**asked, "max_output_tokens": 100}
        with client.responses.stream(**long, text={"format": form}) as stream:
            structured = stream.get_final_response()
        told = client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
    assert structured.status == "completed"
    assert json.loads(structured.output_text).keys() == {"n"}
    part = told.output[0].content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == told.output_text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}


def test_the_background(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    with client:
        created = client.responses.create(**asked, background=True, metadata={"k": "v"})
        assert created.status == "queued"
        done = ended(client, created.id)
        assert done.metadata == {"k": "v"}
        assert done.created_at == created.created_at
        assert done.output_text == client.responses.create(**asked).output_text
        whole = list(client.responses.retrieve(created.id, stream=True))
        assert whole[-1].response == done  # type: ignore[union-attr]
        for event in (whole[0], whole[5], whole[-2]):
            rest = client.responses.retrieve(created.id, stream=True, starting_after=event.sequence_number)
            assert list(rest) == whole[whole.index(event) + 1 :]


def test_a_background_response_is_cancelled(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    long: dict[str, Any] = {**asked, "max_output_tokens": 4_000, "extra_body": {"ignore_eos": True}}
    with client:
        stream = client.responses.create(**long, background=True, stream=True)
        name = ""
        for event in stream:
            if event.type == "response.created":
                assert event.response.status == "queued"
                name = event.response.id
            elif event.type == "response.output_text.delta":
                stream.close()
                break
        assert client.responses.retrieve(name).status == "in_progress"
        cancelled = client.responses.cancel(name)
        assert cancelled.status == "cancelled"
        assert client.responses.cancel(name) == cancelled == ended(client, name)


def test_what_is_not_kept_or_not_served_is_refused_by_name(
    client: openai.OpenAI, asked: dict[str, Any]
) -> None:
    with client:
        for changes in (
            {"previous_response_id": "resp_1"},
            {"conversation": "conv_1"},
            {"tools": [{"type": "web_search"}]},
            {"background": True, "store": False},
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(**asked, **changes)
            assert refused.value.param == next(iter(changes))
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_1")
        name = client.responses.create(**asked, store=False).id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
