"""Every refusal of the gateway, in one table; and that no body whatever makes it fail."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError, MessageSizeTooLargeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.actions import Cancel
from gateway.errors import ErrorBoundary
from gateway.owned_request import OwnedRequest
from schemas.api.errors import ApiError
from schemas.api_keys import new_key
from schemas.records import Tenant
from tests.gateway_factories import DISABLED_KEY, FREE_KEY, Stand

BODY = {"model": "simulated", "prompt": "hi", "max_tokens": 4}
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}
RESPONSE = {"model": "simulated", "input": "hi"}
CHAT_PATH = "/v1/chat/completions"
FORM = (b"content-type", b"multipart/form-data; boundary=x")


def admission_says(status: int, code: str, retry_after_ms: int | None = None) -> Callable[[Stand], None]:
    def arrange(stand: Stand) -> None:
        def answer(owned: OwnedRequest) -> None:
            stand.reject(owned.request, status, code, retry_after_ms)

        stand.outbox.on_request = answer

    return arrange


def draining(stand: Stand) -> None:
    stand.serving.draining = True


def starting(stand: Stand) -> None:
    stand.serving.joined = False


def no_broker(stand: Stand) -> None:
    stand.outbox.error = KafkaConnectionError("gone")


def slow_broker(stand: Stand) -> None:
    stand.outbox.error = TimeoutError()


def small_topic(stand: Stand) -> None:
    stand.outbox.error = MessageSizeTooLargeError()


def past_deadline(stand: Stand) -> None:
    def answer(owned: OwnedRequest) -> None:
        now_ms = owned.request.accepted_at + owned.request.end_ms
        (cancel,) = stand.serving.owner.tick(stand.serving.view, now_ms, 0.0)
        assert isinstance(cancel, Cancel)
        # It waited all the time: admission says it with the reason that it is given.
        stand.reject(owned.request, 499, cancel.record.reason, None)

    stand.outbox.on_request = answer


def failing(stand: Stand) -> None:
    def broken() -> None:
        raise RuntimeError("secret detail")

    stand.serving.check_open = broken  # type: ignore[method-assign]


@dataclass
class Refusal:
    name: str
    status: int
    code: str
    body: object = field(default_factory=lambda: BODY)
    param: str | None = None
    path: str = "/v1/generate"
    method: str = "POST"
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    arrange: Callable[[Stand], None] | None = None
    headers: dict[bytes, bytes] = field(default_factory=dict)


REFUSALS = [
    Refusal("no key", 401, "missing_api_key", options={"key": None},
            headers={b"www-authenticate": b"Bearer"}),
    Refusal("unknown key", 401, "invalid_api_key", options={"key": "hr_" + "x" * 43}),
    Refusal("models without a key", 401, "missing_api_key", method="GET", path="/v1/models",
            options={"key": None}),
    Refusal("disabled tenant", 403, "tenant_disabled", options={"key": DISABLED_KEY}),
    Refusal(
        "class above the tier",
        403,
        "class_not_allowed",
        {**BODY, "priority": "interactive"},
        "priority",
        options={"key": FREE_KEY},
    ),
    Refusal("unknown path", 404, "not_found", path="/v1/embeddings"),
    Refusal("trailing slash", 404, "not_found", path="/v1/generate/"),
    Refusal("unknown model", 404, "model_not_found", {**BODY, "model": "gpt-9"}, "model"),
    Refusal("unknown model, chat", 404, "model_not_found", {**CHAT, "model": "x"}, "model", CHAT_PATH),
    Refusal("unknown model id", 404, "model_not_found", None, "model", "/v1/models/a/b", "GET"),
    Refusal("unknown response", 404, "response_not_found", None, path="/v1/responses/resp_x", method="GET"),
    Refusal("unknown file", 404, "file_not_found", None, path="/v1/files/x", method="GET"),
    Refusal("file without a key", 401, "missing_api_key", path="/v1/files", options={"key": None}),
    Refusal("no form", 415, "unsupported_media_type", param="Content-Type", path="/v1/files"),
    Refusal("compressed file", 415, "unsupported_encoding", param="Content-Encoding", path="/v1/files",
            options={"headers": [(b"content-encoding", b"gzip")]}),
    Refusal("broken form", 400, "invalid_multipart", path="/v1/files", options={"headers": [FORM]}),
    Refusal("slow file", 408, "body_timeout", b"--x\r\n", path="/v1/files",
            options={"hang": True, "headers": [FORM]}, settings={"body_timeout_s": 0.05}),
    Refusal("declared size of a file", 413, "body_too_large", path="/v1/files",
            options={"headers": [FORM, (b"content-length", b"65637")]}, settings={"max_file_bytes": 100}),
    Refusal("too many files at a time", 503, "too_many_bodies", path="/v1/files",
            options={"headers": [FORM]}, settings={"max_bodies_bytes": 10_000_000}),
    Refusal("not kept", 400, "unsupported_field", {**RESPONSE, "previous_response_id": "resp_x"},
            "previous_response_id", "/v1/responses"),
    Refusal("wrong method", 405, "method_not_allowed", method="GET", headers={b"allow": b"POST"}),
    Refusal("wrong method, of two", 405, "method_not_allowed", method="PUT", path="/v1/streams/x",
            headers={b"allow": b"DELETE, GET"}),
    Refusal("HEAD", 405, "method_not_allowed", method="HEAD", headers={b"allow": b"POST"}),
    Refusal("slow body", 408, "body_timeout", options={"hang": True}, settings={"body_timeout_s": 0.05},
            headers={b"connection": b"close"}),
    Refusal("compressed body", 415, "unsupported_encoding", param="Content-Encoding",
            options={"headers": [(b"content-encoding", b"gzip")]}),
    Refusal(
        "declared size",
        413,
        "body_too_large",
        options={"headers": [(b"content-length", b"101")]},
        settings={"max_body_bytes": 100},
    ),
    Refusal(
        "streamed size",
        413,
        "body_too_large",
        options={"parts": [b"x" * 60, b"y" * 60]},
        settings={"max_body_bytes": 100},
    ),
    Refusal("size of all bodies", 503, "too_many_bodies", settings={"max_bodies_bytes": 10}),
    Refusal("no JSON", 400, "invalid_json", b'{"model":'),
    Refusal("not UTF-8", 400, "invalid_json", b'{"model":"\xff"}'),
    Refusal("empty body", 400, "invalid_json", b""),
    Refusal("no object", 400, "invalid_value", [1], "body"),
    Refusal("missing field", 400, "missing_field", {"prompt": "hi"}, "model"),
    Refusal("unknown field", 400, "unknown_field", {**BODY, "best_of": 2}, "best_of"),
    Refusal("wrong type", 400, "invalid_value", {**BODY, "max_tokens": "4"}, "max_tokens"),
    Refusal("out of range", 400, "invalid_value", {**BODY, "temperature": 3}, "temperature"),
    Refusal("unknown class", 400, "invalid_value", {**BODY, "priority": "gold"}, "priority"),
    Refusal("no prompt", 400, "invalid_value", {"model": "simulated"}, "prompt"),
    Refusal("unsupported field", 400, "unsupported_field", {**CHAT, "store": True}, "store", CHAT_PATH),
    Refusal("nested field", 400, "invalid_value", {**CHAT, "messages": [{"role": "x", "content": ""}]},
            "messages[0].role", CHAT_PATH),
    Refusal("many messages", 400, "invalid_value",
            {**CHAT, "messages": [{"role": "user", "content": "hi"}] * 2_049}, "messages", CHAT_PATH),
    Refusal("many parts", 400, "invalid_value",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2_049}]},
            "messages[0].content", CHAT_PATH),
    Refusal("many stop strings", 400, "invalid_value", {**BODY, "stop": ["x"] * 17}, "stop"),
    Refusal("much metadata", 400, "invalid_value", {**CHAT, "metadata": {str(i): "" for i in range(17)}},
            "metadata", CHAT_PATH),
    Refusal("many prompts", 400, "invalid_value", {**BODY, "prompt": ["x"] * 33}, "prompt",
            "/v1/completions"),
    Refusal("many token ids", 400, "invalid_value", {"model": "simulated", "tokens": [1] * 1_000_001},
            "tokens", "/detokenize"),
    Refusal("long field name", 400, "unknown_field", {**BODY, "x" * 5_000: 1}, "x" * 199 + "…"),
    Refusal("long prompt", 400, "context_length_exceeded", {**BODY, "prompt": "a" * 40_000}, "prompt"),
    Refusal("long output", 400, "context_length_exceeded", {**BODY, "max_tokens": 32_768}, "max_tokens"),
    Refusal("limit", 429, "rate_limit_exceeded", arrange=admission_says(429, "rate_limit_exceeded", 1_200),
            headers={b"retry-after": b"2"}),
    Refusal("limit of a stream", 429, "rate_limit_exceeded", {**BODY, "stream": True},
            arrange=admission_says(429, "rate_limit_exceeded"), headers={b"retry-after": b"1"}),
    Refusal("no worker", 503, "no_worker", {**CHAT, "stream": True}, path=CHAT_PATH,
            arrange=admission_says(503, "no_worker", 5_000), headers={b"retry-after": b"5"}),
    Refusal("cancelled by others", 410, "cancelled", arrange=admission_says(499, "cancelled")),
    Refusal("draining", 503, "draining", arrange=draining, headers={b"retry-after": b"1"}),
    Refusal("starting", 503, "starting", arrange=starting, headers={b"retry-after": b"1"}),
    Refusal("broker away", 503, "broker_unavailable", arrange=no_broker, headers={b"retry-after": b"1"}),
    Refusal("record too large", 413, "request_too_large", param="prompt", arrange=small_topic),
    Refusal("broker slow", 503, "broker_unavailable", arrange=slow_broker),
    Refusal("deadline", 504, "deadline_exceeded", arrange=past_deadline),
    Refusal("bug", 500, "internal_error", arrange=failing),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=[refusal.name for refusal in REFUSALS])
async def test_refusal(refusal: Refusal, caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand(**refusal.settings)
    if refusal.arrange is not None:
        refusal.arrange(stand)
    call = await stand.call(refusal.method, refusal.path, body=refusal.body, **refusal.options).finish()
    assert call.status == refusal.status, call.content
    error = call.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (refusal.code, refusal.param)
    assert "secret detail" not in call.content.decode()
    assert call.headers[b"content-type"] == b"application/json"
    assert len(bytes.fromhex(call.headers[b"x-request-id"].decode())) == 16
    assert refusal.headers.items() <= call.headers.items()
    assert (b"retry-after" in call.headers) == (refusal.status in (429, 503))
    assert not stand.serving.readers


async def test_a_key_made_a_moment_ago_is_served_and_only_an_unknown_one_costs_a_look() -> None:
    stand, (key, kept) = Stand(), new_key(0)
    stand.late_tenants = [Tenant("new", 0, [kept], [])]
    for _ in range(2):
        assert (await stand.call("GET", "/v1/models", key=key).finish()).status == 200
    assert stand.catch_ups == 1
    assert (await stand.call("GET", "/v1/models", key="hr_short").finish()).status == 401
    assert (await stand.call("GET", "/v1/models", key=DISABLED_KEY).finish()).status == 403
    assert stand.catch_ups == 1


async def test_an_internal_error_is_in_the_log_with_its_request_id(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand()
    failing(stand)
    call = await stand.call(body=BODY).finish()
    record = next(r for r in caplog.records if r.name == "gateway.errors")
    assert record.exc_info is not None
    assert record.__dict__["request_id"] == call.headers[b"x-request-id"].decode()


async def test_an_error_after_the_start_only_closes() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await scope["exchange"].start(200, [])
        raise ApiError(429, "late", "late")

    stand = Stand()
    stand.app = ErrorBoundary(app, lambda status: None)
    call = stand.call(body=BODY)
    with pytest.raises(RuntimeError, match="late"):
        await call.finish()
    assert [message["type"] for message in call.sent] == ["http.response.start"]


def status_of(path: str, content: bytes) -> int:
    async def ask() -> int:
        stand = Stand()
        admission_says(429, "rate_limit_exceeded", 1)(stand)
        return (await stand.call(path=path, body=content).finish()).status

    return asyncio.run(ask())


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/generate": BODY,
    CHAT_PATH: CHAT,
    "/v1/completions": BODY,
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": RESPONSE,
    "/tokenize": {"model": "simulated", "prompt": "hi"},
    "/detokenize": {"model": "simulated", "tokens": [104, 105]},
}
# These need no worker; the others are refused by admission when they are good.
ANSWERED = {"/v1/messages/count_tokens", "/tokenize", "/detokenize"}
_PATHS = st.sampled_from(sorted(GOOD))


@settings(max_examples=120, deadline=None)
@given(_PATHS, st.binary(max_size=200))
def test_no_bytes_make_it_fail(path: str, content: bytes) -> None:
    assert 400 <= status_of(path, content) < 500


@settings(max_examples=250, deadline=None)
@given(_PATHS, st.data())
def test_no_change_of_a_good_body_makes_it_fail(path: str, data: st.DataObject) -> None:
    body = GOOD[path]
    names = [
        *body,
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stream",
        "priority",
        "stop_token_ids",
        "n",
        "stop",
        "max_tokens",
        "prompt",
        "messages",
        "system",
        "stop_sequences",
        "logprobs",
        "top_logprobs",
        "tokens",
        "add_special_tokens",
        "output_config",
        "input",
        "instructions",
        "background",
        "include",
        "text",
        "tool_choice",
        "reasoning",
        "metadata",
    ]
    changed = {**body, data.draw(st.sampled_from(names)): data.draw(_JSON)}
    content = bytearray(
        json.dumps(changed, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass")
    )
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    status = status_of(path, bytes(content))
    told_at_once = path in ANSWERED or changed.get("background") is True
    assert 400 <= status < 500 or (status == 200 and told_at_once)
