"""The official OpenAI client against the real stack and the real model."""

import json
from typing import Any

import openai
import pytest

from tests.e2e.conftest import RunningStack

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Say a word."}]


@pytest.fixture
def client(gemma_stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gemma_stack.stack.url()}/v1", api_key=gemma_stack.api_key, max_retries=0)


def test_models_are_listed(client: openai.OpenAI, gemma_stack: RunningStack) -> None:
    with client:
        assert [model.id for model in client.models.list()] == [gemma_stack.model]
        assert client.models.retrieve(gemma_stack.model).object == "model"


def test_streaming_says_what_the_whole_answer_says(client: openai.OpenAI, gemma_stack: RunningStack) -> None:
    with client:
        whole = client.chat.completions.create(
            model=gemma_stack.model, messages=MESSAGES, max_tokens=12, temperature=0
        )
        stream = client.chat.completions.create(
            model=gemma_stack.model,
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    finish = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert finish[-1] == whole.choices[0].finish_reason
    assert set(finish[:-1]) == {None}
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens <= 12
    assert whole.usage.prompt_tokens > 3


def test_the_seed_decides_what_is_sampled(client: openai.OpenAI, gemma_stack: RunningStack) -> None:
    with client:
        texts = [
            client.chat.completions.create(
                model=gemma_stack.model, messages=MESSAGES, max_tokens=8, temperature=1.5, seed=seed
            )
            .choices[0]
            .message.content
            for seed in (1, 1, 2)
        ]
    assert texts[0] == texts[1] != texts[2]


def test_choices_whole_and_streamed(client: openai.OpenAI, gemma_stack: RunningStack) -> None:
    asked: dict[str, Any] = {
        "model": gemma_stack.model,
        "messages": MESSAGES,
        "max_tokens": 8,
        "temperature": 1.5,
        "seed": 1,
    }
    with client:
        alone = client.chat.completions.create(**asked)
        whole = client.chat.completions.create(**asked, n=2)
        chunks = list(
            client.chat.completions.create(**asked, n=2, stream=True, stream_options={"include_usage": True})
        )
    texts = ["", ""]
    finished: list[int] = []
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        finished += [choice.index] if choice.finish_reason else []
    assert sorted(finished) == [0, 1]
    assert texts == [choice.message.content for choice in whole.choices]
    assert alone.choices[0].message.content == texts[0] != texts[1]
    assert len({chunk.id for chunk in chunks}) == 1
    assert alone.usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.prompt_tokens == 2 * alone.usage.prompt_tokens


def test_refusals_arrive_as_the_clients_exceptions(client: openai.OpenAI, gemma_stack: RunningStack) -> None:
    with client:
        with pytest.raises(openai.NotFoundError) as not_found:
            client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=gemma_stack.model, messages=MESSAGES, temperature=9)
    assert not_found.value.code == "model_not_found"
    assert bad.value.param == "temperature"
    with (
        openai.OpenAI(
            base_url=f"{gemma_stack.stack.url()}/v1", api_key="hr_wrong", max_retries=0
        ) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_the_client_asks_for_json_and_for_stop_strings(
    client: openai.OpenAI, gemma_stack: RunningStack
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    with client:
        structured = client.chat.completions.create(
            model=gemma_stack.model,
            messages=MESSAGES,
            max_tokens=100,
            seed=5,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "number", "schema": {**schema, "additionalProperties": False}},
            },
        )
        stopped = client.chat.completions.create(
            model=gemma_stack.model,
            messages=MESSAGES,
            max_tokens=40,
            temperature=0,
            stop=["}", "e"],
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={"100": -100},
        )
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(
                model=gemma_stack.model, messages=MESSAGES, logit_bias={"9999999": 1}
            )
    number = json.loads(structured.choices[0].message.content or "")
    assert number.keys() == {"n"}
    assert number["n"] <= 99
    assert not {"}", "e"} & set(stopped.choices[0].message.content or "")
    assert bad.value.param == "logit_bias"
