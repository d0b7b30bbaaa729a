"""Batches of a file's lines by the official clients, over the whole stack: from the upload to the bill."""

import io
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import anthropic
import httpx
import openai
import pytest
from openai.types import Batch

from schemas.api.batches import ENDED
from schemas.api.choices import choice_request_id
from schemas.priority import PriorityClass
from tests.e2e.conftest import RunningStack

T = TypeVar("T")
WAIT_S = 120.0


@pytest.fixture
def client(simulated_stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{simulated_stack.stack.url()}/v1", api_key=simulated_stack.api_key
    ) as client:
        yield client


def until(look: Callable[[], T], enough: Callable[[T], bool]) -> T:
    deadline = time.monotonic() + WAIT_S
    while not enough(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    asked = {"model": "simulated", "max_tokens": 5, "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**asked, **body}}


def upload(client: openai.OpenAI, lines: Iterable[object]) -> str:
    text = b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)
    return client.files.create(file=("lines.jsonl", io.BytesIO(text)), purpose="batch").id


def start(client: openai.OpenAI, lines: Iterable[object], endpoint: Any = "/v1/chat/completions") -> Batch:
    file_id = upload(client, lines)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h")


def end_of(client: openai.OpenAI, batch_id: str) -> Batch:
    return until(lambda: client.batches.retrieve(batch_id), lambda batch: batch.status in ENDED)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_openais_client_gets_a_line_for_each_of_its_lines(
    client: openai.OpenAI, simulated_stack: RunningStack
) -> None:
    asked = [line(f"item-{i}") for i in range(40)]
    asked[7] = line("item-7", temperature=9)  # the API would refuse it
    made = client.batches.create(
        input_file_id=upload(client, asked),
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"job": "nightly"},
    )
    assert (made.status, made.metadata) == ("validating", {"job": "nightly"})
    batch = end_of(client, made.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        40,
        39,
        1,
    )
    assert (
        batch.created_at
        <= (batch.in_progress_at or 0)
        <= (batch.finalizing_at or 0)
        <= (batch.completed_at or 0)
    )
    answers = {found["custom_id"]: found for found in lines_of(client, batch.output_file_id)}
    errors = lines_of(client, batch.error_file_id)
    assert sorted(answers) == sorted(f"item-{i}" for i in range(40) if i != 7)
    for custom_id, found in answers.items():
        assert found["error"] is None
        assert found["response"]["status_code"] == 200
        body = found["response"]["body"]
        assert body["object"] == "chat.completion"
        assert body["usage"]["completion_tokens"] == 5, custom_id
    (refused,) = errors
    assert refused["custom_id"] == "item-7"
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert batch.usage is not None
    assert batch.usage.output_tokens == 39 * 5
    ids = ", ".join(f"'{found['response']['request_id']}'" for found in answers.values())
    billed = until(
        lambda: simulated_stack.sql(
            f"SELECT count(), sum(output_tokens), any(class) FROM usage_final WHERE request_id IN ({ids})"
        ),
        lambda rows: rows[0][0] == "39",
    )
    assert billed == [["39", "195", "batch"]]
    listed = client.batches.list(limit=1)
    assert listed.data[0].id == batch.id


def test_lines_of_every_url(client: openai.OpenAI) -> None:
    asked = {
        "/v1/chat/completions": line("chat", logprobs=True),
        "/v1/completions": {**line("text", "/v1/completions"), "body": {"model": "simulated", "prompt": "x"}},
        "/v1/responses": {**line("resp", "/v1/responses"), "body": {"model": "simulated", "input": "x"}},
        "/v1/messages": line("msg", "/v1/messages"),
        "/v1/generate": line("gen", "/v1/generate"),
    }
    batches = {url: start(client, [each], url) for url, each in asked.items()}
    kinds = {}
    for url, made in batches.items():
        batch = end_of(client, made.id)
        assert (batch.status, batch.error_file_id) == ("completed", None), lines_of(
            client, batch.error_file_id
        )
        (found,) = lines_of(client, batch.output_file_id)
        body = found["response"]["body"]
        kinds[url] = body.get("object") or body.get("type") or "text" in body
    assert kinds == {
        "/v1/chat/completions": "chat.completion",
        "/v1/completions": "text_completion",
        "/v1/responses": "response",
        "/v1/messages": "message",
        "/v1/generate": True,
    }


def test_choices_of_a_line_are_answered_and_counted_as_online(
    client: openai.OpenAI, simulated_stack: RunningStack
) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    online = client.chat.completions.create(model="simulated", messages=messages, max_tokens=5, n=3, seed=7)
    batch = end_of(client, start(client, [line("chat", messages=messages, n=3, seed=7), line("one")]).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (2, 2)
    found = {each["custom_id"]: each["response"] for each in lines_of(client, batch.output_file_id)}
    body = found["chat"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 3
    assert online.usage is not None
    assert body["usage"]["prompt_tokens"] == online.usage.prompt_tokens
    assert body["usage"]["completion_tokens"] == online.usage.completion_tokens == 15
    texts = {"model": "simulated", "prompt": ["a", "b"], "n": 2, "max_tokens": 3}
    asked = {**line("texts", "/v1/completions"), "body": texts}
    batch = end_of(client, start(client, [asked], "/v1/completions").id)
    (each,) = lines_of(client, batch.output_file_id)
    assert len(each["response"]["body"]["choices"]) == 4
    assert each["response"]["body"]["usage"]["completion_tokens"] == 12
    query = (
        "SELECT count(), uniqExact(request_id), sum(output_tokens) FROM usage_final "
        f"WHERE request_id IN ({', '.join(map(repr, _choice_ids(each, 4)))})"
    )
    assert until(lambda: simulated_stack.sql(query), lambda rows: rows[0][0] == "4") == [["4", "4", "12"]]


def _choice_ids(line: dict[str, Any], count: int) -> list[str]:
    first = bytes.fromhex(line["response"]["request_id"])
    return [choice_request_id(first, i).hex() for i in range(count)]


@pytest.mark.parametrize(
    ("lines", "number", "param"),
    [
        ([line("a"), line("b"), line("a")], 3, "custom_id"),
        ([line("a"), b"{no json"], 2, None),
        ([line("a"), {"method": "POST", "url": "/v1/chat/completions", "body": {}}], 2, "custom_id"),
        ([line("a", url="/v1/completions")], 1, "url"),
    ],
)
def test_a_file_that_is_none_fails_with_the_number_of_its_line(
    client: openai.OpenAI, lines: list[object], number: int, param: str | None
) -> None:
    batch = end_of(client, start(client, lines).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert (batch.errors.data[0].line, batch.errors.data[0].param) == (number, param)
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


def test_a_cancel_stops_what_runs_and_delivers_what_is_done(client: openai.OpenAI) -> None:
    # Those that begin alike go together, these first. The long ones would take 16 s at least.
    quick = [line(f"a-quick-{i}", max_tokens=2) for i in range(8)]
    asked = [*quick, *(line(f"long-{i}", max_tokens=8_000, ignore_eos=True) for i in range(100))]
    made = start(client, asked)
    until(
        lambda: client.batches.retrieve(made.id).request_counts,
        lambda counts: counts is not None and counts.completed >= 8,
    )
    partial = client.batches.retrieve(made.id)
    assert partial.status == "in_progress"
    assert len(lines_of(client, partial.output_file_id)) >= 8  # read while it runs
    with pytest.raises(openai.ConflictError, match=made.id):
        client.files.delete(made.input_file_id)
    assert client.batches.cancel(made.id).status == "cancelling"
    batch = end_of(client, made.id)
    assert batch.status == "cancelled"
    done, rest = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert len(done) + len(rest) == 108
    assert {each["custom_id"] for each in [*done, *rest]} == {each["custom_id"] for each in asked}
    assert {each["error"]["code"] for each in rest} == {"batch_cancelled"}
    assert {f"a-quick-{i}" for i in range(8)} <= {each["custom_id"] for each in done}
    with pytest.raises(openai.ConflictError, match="cancelled"):
        client.with_options(max_retries=0).batches.cancel(start_and_end(client))
    assert client.files.delete(made.input_file_id).deleted


def start_and_end(client: openai.OpenAI) -> str:
    batch = end_of(client, start(client, [line("one")]).id)
    return batch.id


def test_the_own_shape_takes_lines_of_generate(client: openai.OpenAI, simulated_stack: RunningStack) -> None:
    lines = [{"custom_id": f"g-{i}", "prompt": f"{i}", "max_tokens": 3} for i in range(3)]
    file_id = upload(client, [*lines, line("as-a-line")])
    with simulated_stack.client() as http:
        made = http.post("/v1/batches", json={"input_file_id": file_id, "model": "simulated"}).json()
        assert made == {"batch_id": made["batch_id"], "status": "queued"}

        def look() -> Any:
            return http.get(f"/v1/batches/{made['batch_id']}").json()

        batch = until(look, lambda found: found["status"] in ENDED)
    assert (batch["status"], batch["counts"]["completed"]) == ("completed", 4)
    answers = lines_of(client, batch["output_file_id"])
    assert sorted(found["custom_id"] for found in answers) == ["as-a-line", "g-0", "g-1", "g-2"]


def test_anthropics_client_gets_a_result_for_each_message(simulated_stack: RunningStack) -> None:
    client = anthropic.Anthropic(base_url=simulated_stack.stack.url(), api_key=simulated_stack.api_key)
    params: Any = {"model": "simulated", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    requests: Any = [{"custom_id": f"m-{i}", "params": params} for i in range(5)]
    requests[3] = {"custom_id": "m-3", "params": {**params, "max_tokens": 0}}
    made = client.messages.batches.create(requests=requests)
    assert made.processing_status == "in_progress"
    batch = until(
        lambda: client.messages.batches.retrieve(made.id), lambda found: found.processing_status == "ended"
    )
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (
        0,
        4,
        1,
        0,
        0,
    )
    results = {found.custom_id: found.result for found in client.messages.batches.results(made.id)}
    assert sorted(results) == [f"m-{i}" for i in range(5)]
    for custom_id, result in results.items():
        if custom_id == "m-3":
            assert result.type == "errored"
            assert result.error.error.type == "invalid_request_error"
        else:
            assert result.type == "succeeded"
            assert result.message.usage.output_tokens == 4
    assert [found.id for found in client.messages.batches.list(limit=1).data] == [made.id]
    assert client.messages.batches.delete(made.id).id == made.id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(made.id)


def test_another_tenant_sees_nothing(client: openai.OpenAI, simulated_stack: RunningStack) -> None:
    batch_id = start_and_end(client)
    output = client.batches.retrieve(batch_id).output_file_id
    key = simulated_stack.tenant("someone-else", PriorityClass.INTERACTIVE)
    headers = {"Authorization": f"Bearer {key}"}
    for path in (f"/v1/batches/{batch_id}", f"/v1/files/{output}", f"/v1/files/{output}/content"):
        assert httpx.get(f"{simulated_stack.stack.url()}{path}", headers=headers).status_code == 404
