"""The APIs that generate, by what their clients send and read: for tests of what holds in all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Json = dict[str, Any]


class Said(NamedTuple):
    """`ending` is the API's own word for why it ended."""

    text: str
    ending: str | None
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class ApiForm:
    """`prompt` makes the field that asks; `by_length` and `by_stop` are what `ending` says. `whole` reads an
    answer, `streamed` the JSON of its events."""

    path: str
    prompt: Callable[[str], Json]
    whole: Callable[[Json], Said]
    streamed: Callable[[list[Json]], Said]
    by_length: str
    by_stop: str
    limit_field: str = "max_tokens"
    stream_fields: Json | None = None

    def body(self, model: str, text: str, limit: int, *, stream: bool = False, **changes: Any) -> Json:
        more = {"stream": True, **(self.stream_fields or {})} if stream else {}
        return {"model": model, self.limit_field: limit, **self.prompt(text), **more, **changes}


def _messages(text: str) -> Json:
    return {"messages": [{"role": "user", "content": text}]}


def _generated(answer: Json) -> Said:
    usage = answer["usage"]
    return Said(answer["text"], answer["stop_reason"], usage["input_tokens"], usage["output_tokens"])


def _generated_stream(events: list[Json]) -> Said:
    *tokens, done = events
    return _generated({**done, "text": "".join(event["text"] for event in tokens)})


def _openai(answer: Json, text: str | None) -> Said:
    (choice,), usage = answer["choices"], answer["usage"]
    assert text is not None
    return Said(text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])


def _openai_stream(text_of: Callable[[Json], str]) -> Callable[[list[Json]], Said]:
    def streamed(events: list[Json]) -> Said:
        *chunks, last = events
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        answer = {"choices": choices[-1:], "usage": last["usage"]}
        return _openai(answer, "".join(text_of(choice) for choice in choices))

    return streamed


def _message(answer: Json) -> Said:
    text = "".join(block["text"] for block in answer["content"])
    return _message_said(text, answer["stop_reason"], answer["usage"])


def _message_said(text: str, ending: str | None, usage: Json) -> Said:
    # Anthropic counts what was found in the cache beside the input.
    input_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return Said(text, ending, input_tokens, usage["output_tokens"])


def _message_stream(events: list[Json]) -> Said:
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    (end,) = (event for event in events if event["type"] == "message_delta")
    return _message_said(text, end["delta"]["stop_reason"], end["usage"])


def _response(answer: Json) -> Said:
    usage, why = answer["usage"], answer["incomplete_details"]
    text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    ending = answer["status"] if why is None else why["reason"]
    return Said(text, ending, usage["input_tokens"], usage["output_tokens"])


def _response_stream(events: list[Json]) -> Said:
    said = _response(events[-1]["response"])
    assert said.text == "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    return said


_USAGE: Json = {"stream_options": {"include_usage": True}}

API_FORMS = (
    ApiForm("/v1/generate", lambda text: {"prompt": text}, _generated, _generated_stream, "length", "stop"),
    ApiForm(
        "/v1/chat/completions",
        _messages,
        lambda answer: _openai(answer, answer["choices"][0]["message"]["content"]),
        _openai_stream(lambda choice: choice["delta"].get("content") or ""),
        "length",
        "stop",
        stream_fields=_USAGE,
    ),
    ApiForm(
        "/v1/completions",
        lambda text: {"prompt": text},
        lambda answer: _openai(answer, answer["choices"][0]["text"]),
        _openai_stream(lambda choice: str(choice["text"])),
        "length",
        "stop",
        stream_fields=_USAGE,
    ),
    ApiForm("/v1/messages", _messages, _message, _message_stream, "max_tokens", "end_turn"),
    ApiForm(
        "/v1/responses",
        lambda text: {"input": text},
        _response,
        _response_stream,
        "max_output_tokens",
        "completed",
        "max_output_tokens",
    ),
)
