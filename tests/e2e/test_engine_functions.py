"""What the engine can do, asked for at the doors of whole stacks."""

import json
from typing import Any

import pytest

from tests.e2e.conftest import RunningStack
from tests.e2e.test_batch_by_topic import exchange
from tests.e2e.test_streams import stream, text_of

# The simulated model writes what a grammar allows; its tokens are bytes.
CUT: dict[str, Any] = {"prompt": "hi", "max_tokens": 60, "regex": "abcSTOP[a-z]{30}", "stop": ["TO", "STOP"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "large": {"type": "boolean"},
    },
    "required": ["city", "large"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "town", "strict": True, "schema": SCHEMA}}


def check_town(text: str) -> None:
    town = json.loads(text)
    assert town.keys() == {"city", "large"}
    assert town["city"] in ("Paris", "Rome")
    assert isinstance(town["large"], bool)


def test_a_stop_string_cuts_the_text_in_all_shapes_of_an_answer(simulated_stack: RunningStack) -> None:
    usage = {"input_tokens": 3, "cached_tokens": 0, "output_tokens": 6}  # up to the last byte of TO
    whole = simulated_stack.generate(**CUT).json()
    assert (whole["text"], whole["stop_reason"], whole["usage"]) == ("abcS", "stop", usage)
    found = stream(simulated_stack, **CUT)
    assert text_of(found) == "abcS"
    assert found[-1] == {"type": "done", "usage": usage, "stop_reason": "stop"}
    simulated_stack.tenant("cutters")
    record = {"custom_id": "1", "model": simulated_stack.model, **CUT}
    answer = exchange(simulated_stack, "cutters", [record], 1)["1"]
    assert (answer["text"], answer["usage"]) == ("abcS", usage)


def test_json_by_a_schema_from_the_simulated_model(simulated_stack: RunningStack) -> None:
    for _ in range(5):
        answer = simulated_stack.generate(prompt="hi", max_tokens=200, response_format=FORMAT).json()
        check_town(answer["text"])
        assert answer["stop_reason"] == "stop"


def test_json_by_a_schema_from_the_real_model(gemma_stack: RunningStack) -> None:
    body: dict[str, Any] = {
        "model": gemma_stack.model,
        "messages": [{"role": "user", "content": "A town, as JSON."}],
        "max_tokens": 200,
        "response_format": FORMAT,
    }
    with gemma_stack.client() as client:
        for seed in range(3):
            answer = client.post("/v1/chat/completions", json={**body, "seed": seed}).json()
            check_town(answer["choices"][0]["message"]["content"])
            assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_real_model_stops_at_a_stop_string(gemma_stack: RunningStack) -> None:
    body: dict[str, Any] = {"prompt": "A B C D E F", "max_tokens": 12, "temperature": 0}
    free = gemma_stack.generate(**body).json()
    assert free["text"].startswith(" G H I J K")
    cut = gemma_stack.generate(**body, stop=["J K"]).json()
    assert (cut["text"], cut["stop_reason"]) == (" G H I ", "stop")
    assert cut["usage"]["output_tokens"] == 5
    assert text_of(stream(gemma_stack, **body, stop=["J K"])) == " G H I "


@pytest.mark.parametrize("stack", ["simulated_stack", "gemma_stack"])
def test_a_prompt_asked_again_is_found_in_the_cache_by_its_tenant_alone(
    stack: str, request: pytest.FixtureRequest
) -> None:
    running: RunningStack = request.getfixturevalue(stack)
    body: dict[str, Any] = {
        "prompt": "The same long beginning, word by word, of many prompts that one tenant sends. " * 4,
        "max_tokens": 8,
        "temperature": 0,
    }
    keys = [running.tenant(f"{name}-{stack.split('_')[0]}") for name in ("first", "second")]
    usages, texts = [], []
    for key in (keys[0], keys[0], keys[1]):
        found = stream(running, key, **body)
        usages.append(found[-1]["usage"])
        texts.append(text_of(found))
    length = usages[0]["input_tokens"]
    assert length > 50
    cached = [usage["cached_tokens"] for usage in usages]
    assert cached == [0, (length - 1) // 16 * 16, 0]
    if stack == "gemma_stack":  # the simulated model's words depend on the request
        assert len(set(texts)) == 1
    rows = running.sql(
        f"SELECT tenant, sum(cached_tokens) FROM usage_final WHERE tenant LIKE '%-{stack.split('_')[0]}' "
        "GROUP BY tenant ORDER BY tenant"
    )
    assert {row[1] for row in rows} <= {"0", str(cached[1])}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "("}, "regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
    ],
)
def test_what_cannot_be_asked_is_a_400_that_names_it(
    simulated_stack: RunningStack, fields: dict[str, Any], param: str
) -> None:
    answer = simulated_stack.generate(prompt="hi", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
