"""/v1/completions and log probabilities by the official OpenAI client, over the real stack and model."""

import math
from typing import Any

import openai
import pytest

from tests.e2e.conftest import RunningStack

PROMPT = "The capital of France is"


@pytest.fixture
def client(gemma_stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gemma_stack.stack.url()}/v1", api_key=gemma_stack.api_key, max_retries=0)


def test_a_completion_whole_and_streamed_with_log_probabilities(
    client: openai.OpenAI, gemma_stack: RunningStack
) -> None:
    body: dict[str, Any] = {
        "model": gemma_stack.model,
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 3,
    }
    with client:
        whole = client.completions.create(**body)
        chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert "".join(told.tokens) == choice.text
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(8)]
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert logprob == top[token] == max(top.values()) <= 0  # greedy
        assert len(top) == 3
    streamed = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.text for part in streamed) == choice.text
    pieces = [part.logprobs for part in streamed if part.logprobs is not None]
    assert [token for piece in pieces for token in piece.tokens or ()] == told.tokens
    assert [offset for piece in pieces for offset in piece.text_offset or ()] == told.text_offset
    assert [p for piece in pieces for p in piece.token_logprobs or ()] == pytest.approx(
        told.token_logprobs, abs=1e-5
    )
    assert streamed[-1].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8


def test_token_ids_are_a_prompt_and_text_comes_back(client: openai.OpenAI, gemma_stack: RunningStack) -> None:
    with gemma_stack.client() as http:
        asked = {"model": gemma_stack.model, "prompt": PROMPT}
        tokens = http.post("/tokenize", json=asked).json()
        text = http.post("/detokenize", json={"model": gemma_stack.model, "tokens": tokens["tokens"]}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 6
    assert text == {"prompt": f"<bos>{PROMPT}"}
    with client:
        whole = client.completions.create(model=gemma_stack.model, prompt=PROMPT, temperature=0)
        prompts: list[Any] = [tokens["tokens"], [PROMPT]]
        starts = [
            client.completions.create(model=gemma_stack.model, prompt=prompt, temperature=0, max_tokens=3)
            for prompt in prompts
        ]
        several = client.completions.create(
            model=gemma_stack.model, prompt=[PROMPT, "Rome is"], temperature=0, max_tokens=3
        )
        with pytest.raises(openai.BadRequestError) as echo:
            client.completions.create(model=gemma_stack.model, prompt=PROMPT, echo=True)
    for start in starts:
        assert start.choices[0].text
        assert whole.choices[0].text.startswith(start.choices[0].text)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 16)
    assert echo.value.param == "echo"
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == starts[1].choices[0].text != several.choices[1].text
    assert several.usage is not None
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (6 + 3, 6)


def test_log_probabilities_of_a_chat_answer(client: openai.OpenAI, gemma_stack: RunningStack) -> None:
    body: dict[str, Any] = {
        "model": gemma_stack.model,
        "messages": [{"role": "user", "content": "Say a word."}],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "service_tier": "auto",
    }
    with client:
        whole = client.chat.completions.create(**body)
        chunks = list(
            client.chat.completions.create(
                **body,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            )
        )
    assert whole.service_tier == "default"
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    data = b"".join(bytes(entry.bytes or ()) for entry in told.content)
    assert data.decode("utf-8", "ignore") == whole.choices[0].message.content
    for entry in told.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-6
    streamed = [
        entry.token
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == [entry.token for entry in told.content]
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert whole.usage is not None
    assert (counts[0], counts[-1]) == (0, whole.usage.completion_tokens)
