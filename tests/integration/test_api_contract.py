"""The gateway over HTTP against its OpenAPI document: what schemathesis makes of it, and broken bodies."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from gateway.openapi import document
from gateway.owned_request import OwnedRequest
from schemas.api.refusals import REFUSALS
from schemas.records import TokenLogprobs
from tests.gateway_factories import KEY, Stand
from tests.http_stand import HttpStand, http_stand
from tests.unit.test_gateway_refusals import GOOD

SCHEMA = schemathesis.openapi.from_dict(document())
# Ready it is never: there are no heartbeats.
OPERATIONS: list[Any] = [
    operation
    for path, methods in SCHEMA.items()
    if path not in ("/health/ready", "/metrics")
    for operation in methods.values()
]
CHECKED = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
HEADERS = {"authorization": f"Bearer {KEY}"}
TABLE = {(kind.status, kind.code) for kind in REFUSALS}
ANTHROPIC_TYPES = {(kind.status, kind.anthropic_type) for kind in REFUSALS}
_TIMEOUT_S = 20


def serve(stand: Stand, owned: OwnedRequest) -> None:
    request = owned.request
    count = min(3, request.sampling.max_tokens)
    stand.dispatched(request)
    told = [] if request.sampling.logprobs is None else [TokenLogprobs(-1.0, [111], [-1.0])] * count
    stand.tokens(request, 0, [111] * count, "length", told)
    stand.complete(request, count)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStand]:
    with http_stand(serve, object_store=str(tmp_path_factory.mktemp("objects"))) as stand:
        yield stand


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


CASES = [
    pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    # Nothing can be wrong about a request that has no parts.
    if mode is GenerationMode.POSITIVE or operation.body or [*operation.iter_parameters()]
]


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_answers_are_as_the_document_says(
    stand: HttpStand, session: requests.Session, operation: Any, mode: GenerationMode
) -> None:
    cases = operation.as_strategy(generation_mode=mode)

    @settings(max_examples=12, derandomize=True)
    @given(cases, st.booleans())
    def check(case: Any, known_model: bool) -> None:
        if known_model and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "simulated"
        call(stand, session, case)

    check()


def call(stand: HttpStand, session: requests.Session, case: Any) -> int:
    """The status of an answer that is as the document says."""
    answer = case.call_and_validate(
        base_url=f"http://127.0.0.1:{stand.port}",
        session=session,
        headers=HEADERS,
        checks=CHECKED,
        timeout=_TIMEOUT_S,
    )
    status: int = answer.status_code
    return status


BODIES: dict[str, dict[str, Any]] = {
    **GOOD,
    "/v1/generate": {**GOOD["/v1/generate"], "stop": ["a", "bc"], "logit_bias": {"7": -1.5}, "stream": True},
    "/v1/chat/completions": {
        **GOOD["/v1/chat/completions"],
        "logprobs": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}},
        },
    },
    "/v1/completions": {**GOOD["/v1/completions"], "prompt": ["hi", "ho"], "n": 2, "stream": True},
    "/v1/messages": {
        **GOOD["/v1/messages"],
        "system": [{"type": "text", "text": "é"}],
        "stop_sequences": ["x"],
    },
    "/v1/responses": {"model": "simulated", "input": "hi", "metadata": {"a": "b"}, "max_output_tokens": 4},
    "/v1/streams/none/token": {"expires_in": 9},
}
# fmt: off
TOKENS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u", b"\\ud800", b"\0", b"\xff", b"\xc3",
          b"-", b"0", b"1e999", b"9" * 400, b"NaN", b"null", b"true", b"{}", b"[" * 2_000,
          b'{"a":' * 2_000]
# fmt: on


@st.composite
def broken(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a good body of its with some bytes flipped, cut out, put in or doubled."""
    path = draw(st.sampled_from(sorted(BODIES)))
    content = bytearray(json.dumps(BODIES[path]).encode())
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(content)))
        end = min(len(content), begin + draw(st.sampled_from([0, 1, 2, 8, 100])))
        match draw(st.sampled_from(["flip", "cut", "insert", "double"])):
            case "flip" if begin < len(content):
                content[begin] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[begin:end]
            case "double":
                content[end:end] = content[begin:end]
            case _:
                content[begin:begin] = draw(st.sampled_from(TOKENS) | st.binary(min_size=1, max_size=4))
    return path, bytes(content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [path for path in BODIES if "none" not in path])
def test_good_bodies_are_answered_as_the_document_says(
    stand: HttpStand, session: requests.Session, path: str, stream: bool
) -> None:
    operation: Any = SCHEMA[path]["POST"]
    body = {**BODIES[path], "stream": stream}
    if path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
        del body["stream"]
    case = operation.Case(body=body, media_type="application/json")
    assert call(stand, session, case) == 200


def test_a_model_is_described_as_the_document_says(stand: HttpStand, session: requests.Session) -> None:
    operation: Any = SCHEMA["/v1/models/{model}"]["GET"]
    assert call(stand, session, operation.Case(path_parameters={"model": "simulated"})) == 200


def test_no_broken_body_makes_it_fail(stand: HttpStand, session: requests.Session) -> None:
    seen: set[int] = set()

    @settings(max_examples=2_000, derandomize=True)
    @given(broken(), st.sampled_from([{}, {"idempotency-key": "one"}]))
    def check(request: tuple[str, bytes], headers: dict[str, str]) -> None:
        path, content = request
        url = f"http://127.0.0.1:{stand.port}{path}"
        answer = session.post(url, data=content, headers={**HEADERS, **headers}, timeout=_TIMEOUT_S)
        seen.add(answer.status_code)
        if answer.status_code == 200:
            return
        error = answer.json()["error"]
        if path.startswith("/v1/messages"):
            assert (answer.status_code, error["type"]) in ANTHROPIC_TYPES
        else:
            assert (answer.status_code, error["code"]) in TABLE
        assert answer.status_code < 500, answer.text

    check()
    assert {200, 400, 404} <= seen
