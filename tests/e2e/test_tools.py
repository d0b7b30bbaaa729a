"""Tools by the official clients over the whole stack: simulated tokens keep to the grammar of the calls."""

import json
from collections.abc import Iterator
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest

from tests.e2e.conftest import RunningStack, running_stack, simulated_config
from tests.tool_model import TOOL_MODEL, WEATHER, put_in_catalogue

USER: dict[str, Any] = {"role": "user", "content": "How is the weather?"}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]


@pytest.fixture(scope="module")
def tool_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("tools")
    put_in_catalogue(folder)
    config = simulated_config(folder / "data", models_dir=folder, models=(TOOL_MODEL,))
    with running_stack(config) as running:
        yield running


def test_openais_client_gets_calls_and_sends_results(tool_stack: RunningStack) -> None:
    asked: dict[str, Any] = {"model": TOOL_MODEL, "tools": TOOLS, "max_tokens": 4000, "seed": 3}
    with openai.OpenAI(
        base_url=f"{tool_stack.stack.url()}/v1", api_key=tool_stack.api_key, max_retries=0
    ) as client:
        create, streaming = (
            cast(Any, client.chat.completions.create),
            cast(Any, client.chat.completions.stream),
        )
        whole = create(**asked, messages=[USER], tool_choice="required")
        with streaming(
            **asked, messages=[USER], tool_choice="required", stream_options={"include_usage": True}
        ) as stream:
            streamed = stream.get_final_completion()
        said = whole.choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in said.tool_calls]
        after = create(
            **{**asked, "max_tokens": 5}, messages=[USER, said.model_dump(), *results], tool_choice="none"
        )
    for completion in (whole, streamed):
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert streamed.usage.completion_tokens > 0
    assert after.choices[0].finish_reason == "length"
    assert after.choices[0].message.tool_calls is None


def test_anthropics_client_gets_calls_and_sends_results(tool_stack: RunningStack) -> None:
    asked: dict[str, Any] = {
        "model": TOOL_MODEL,
        "max_tokens": 4000,
        "tools": [{"name": "weather", "input_schema": WEATHER["parameters"]}],
    }
    with anthropic.Anthropic(
        base_url=tool_stack.stack.url(), api_key=tool_stack.api_key, max_retries=0
    ) as client:
        create, streaming = cast(Any, client.messages.create), cast(Any, client.messages.stream)
        whole = create(**asked, messages=[USER], tool_choice={"type": "any"})
        with streaming(**asked, messages=[USER], tool_choice={"type": "tool", "name": "weather"}) as stream:
            streamed = stream.get_final_message()
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"} for block in whole.content
        ]
        turns = [USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        after = create(**{**asked, "max_tokens": 5}, messages=turns, tool_choice={"type": "none"})
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        assert message.content
        for block in message.content:
            assert (block.type, block.name) == ("tool_use", "weather")
            assert block.input["city"] in ("Rome", "Oslo")
    assert len(streamed.content) == 1
    assert [block.type for block in after.content] == ["text"]


def sse_events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """(id, data) of those that have both."""
    found = []
    for block in answer.text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if "id" in fields and fields.get("data", "").startswith("{"):
            found.append((fields["id"], json.loads(fields["data"])))
    return found


def told(parts: list[tuple[str, list[dict[str, Any]]]]) -> list[tuple[Any, ...]]:
    """Of each part of a call: which call's, its id, its name, what is added to its arguments."""
    functions = [(call, call.get("function", call)) for _, calls in parts for call in calls]
    return [(c["index"], c.get("id"), f.get("name"), f["arguments"]) for c, f in functions]


def test_a_stream_of_calls_goes_on_behind_any_event(tool_stack: RunningStack) -> None:
    body = {"model": TOOL_MODEL, "tools": TOOLS, "tool_choice": "required", "max_tokens": 4000, "seed": 3}
    with tool_stack.client() as client:
        answer = client.post("/v1/chat/completions", json={**body, "messages": [USER], "stream": True})
        path = f"/v1/streams/{answer.headers['x-headrace-stream']}"
        chunks = [(n, data["choices"][0]["delta"]) for n, data in sse_events(answer)]
        parts = [(n, delta["tool_calls"]) for n, delta in chunks if "tool_calls" in delta]
        assert len(parts) > 10
        for num_had in (0, 1, 2, len(parts) // 2, len(parts) - 1, len(parts)):
            last = parts[num_had - 1][0] if num_had else "-1"
            rest = sse_events(client.get(path, headers={"Last-Event-ID": last}))
            behind = [(n, data["tool_calls"]) for n, data in rest if "tool_calls" in data]
            assert told(behind) == told(parts[num_had:])
            assert rest[-1][1]["type"] == "done"
