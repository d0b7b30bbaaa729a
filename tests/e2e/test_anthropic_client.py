"""The official Anthropic client against the real stack and the real model."""

from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam

from tests.e2e.conftest import RunningStack

MESSAGES: list[MessageParam] = [{"role": "user", "content": "Say a word."}]


@pytest.fixture
def client(gemma_stack: RunningStack) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=gemma_stack.stack.url(), api_key=gemma_stack.api_key, max_retries=0, timeout=60.0
    )


def asked(running: RunningStack, sampling: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Arguments of a request; the client knows no fields of sampling any more, but sends them."""
    extra = {"temperature": 0.0} if sampling is None else sampling
    return {
        "model": running.model,
        "messages": MESSAGES,
        "max_tokens": 12,
        "extra_body": extra,
        **changes,
    }


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    text: str = block.text
    return text


def test_an_answer_is_continued(client: anthropic.Anthropic, gemma_stack: RunningStack) -> None:
    begun: list[MessageParam] = [
        {"role": "user", "content": "Which city is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    with client:
        message = client.messages.create(**asked(gemma_stack, messages=begun, max_tokens=3))
    assert "Paris" in text_of(message)


def test_streaming_says_what_the_whole_answer_says(
    client: anthropic.Anthropic, gemma_stack: RunningStack
) -> None:
    greedy = {"temperature": 0.5, "top_k": 1, "top_p": 0.9}
    body = asked(gemma_stack, greedy, system="You are brief.", metadata={"user_id": "u"})
    with client:
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        counted = client.messages.count_tokens(
            model=gemma_stack.model, messages=MESSAGES, system="You are brief."
        )
    assert isinstance(whole, anthropic.types.Message)
    assert text_of(whole)
    assert whole.id.startswith("msg_")
    assert whole._request_id is not None
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert (text_of(streamed), streamed.stop_reason) == (text_of(whole), whole.stop_reason)
    for message in (whole, streamed):
        assert 1 <= message.usage.output_tokens <= 12
        read = message.usage.cache_read_input_tokens or 0
        assert message.usage.input_tokens + read == counted.input_tokens
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "content_block_delta" in kinds


def test_all_raw_events_are_known_to_the_client(
    client: anthropic.Anthropic, gemma_stack: RunningStack
) -> None:
    with client:
        events = list(client.messages.create(**asked(gemma_stack, max_tokens=3), stream=True))
    kinds = [event.type for event in events]
    assert [kind for kind in kinds if kind != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    (end,) = [event for event in events if event.type == "message_delta"]
    assert end.delta.stop_reason == "max_tokens"
    assert end.usage.output_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_the_sequence_that_stopped_is_named(
    client: anthropic.Anthropic, gemma_stack: RunningStack, stream: bool
) -> None:
    with client:
        text = text_of(client.messages.create(**asked(gemma_stack)))
        stop = text[3:5]
        body = asked(gemma_stack, stop_sequences=["never said", stop])
        if stream:
            with client.messages.stream(**body) as events:
                stopped = events.get_final_message()
        else:
            stopped = client.messages.create(**body)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == text[: text.index(stop)]


def test_refusals_arrive_as_the_clients_exceptions(
    client: anthropic.Anthropic, gemma_stack: RunningStack
) -> None:
    tool: Any = {"name": "t", "input_schema": {"type": "object"}}
    with client:
        with pytest.raises(anthropic.NotFoundError) as not_found:
            client.messages.create(**asked(gemma_stack, model="claude-9"))
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(**asked(gemma_stack, {"temperature": 1.5}))
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            client.messages.create(**asked(gemma_stack, tools=[tool]))
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            client.messages.count_tokens(model=gemma_stack.model, messages=MESSAGES, tools=[tool])
    body: Any = not_found.value.body
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"] == not_found.value.request_id
    with (
        anthropic.Anthropic(base_url=gemma_stack.stack.url(), api_key="hr_wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**asked(gemma_stack))


def test_models_are_listed_in_anthropics_shape(
    client: anthropic.Anthropic, gemma_stack: RunningStack
) -> None:
    with client:
        (listed,) = client.models.list(limit=1)
        assert (listed.id, listed.type) == (gemma_stack.model, "model")
        assert client.models.retrieve(gemma_stack.model) == listed
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("claude-9")
