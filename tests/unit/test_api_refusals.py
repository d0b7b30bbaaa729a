"""The table of refusals against the code that refuses, and against what clients get."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.ends import error_of
from gateway.errors import ErrorBoundary
from gateway.exchange import Receive, Scope, Send
from schemas.api.errors import TYPES, ApiError
from schemas.api.refusals import REFUSALS, RefusalKind
from schemas.records import Failed
from tests.gateway_factories import Call
from tests.unit.test_gateway_refusals import REFUSALS as CASES

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("gateway", "schemas", "streams")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "refusals.py"
]
TABLE = {(kind.status, kind.code) for kind in REFUSALS}
# What the router raises beside 404, of which there is none today.
ELSEWHERE = {"http_error"}


def constants(tree: ast.AST) -> Iterator[str]:
    return (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def refusals_in(tree: ast.AST) -> Iterator[tuple[int | None, str]]:
    """(status, code) as far as they are spelled out where a refusal is made."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id not in ("ApiError", "Refusal", "Rejected"):
            continue
        values = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args[:2]]
        if len(values) == 2 and isinstance(values[1], str):
            yield (values[0] if isinstance(values[0], int) else None), values[1]


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_the_table_knows_every_refusal_in_the_code(path: Path) -> None:
    codes = {code for _, code in TABLE}
    for status, code in refusals_in(ast.parse(path.read_text())):
        if code not in ELSEWHERE:
            assert code in codes, f"{code} is not in schemas/api/refusals.py"
            assert status is None or (status, code) in TABLE, f"{status} {code} is not in refusals.py"


@pytest.mark.parametrize(
    "code",
    [
        "worker_lost",
        "worker_cancelled",
        "output_gap",
        "engine_error",
        "engine_stalled",
        "engine_fault",
        "no_answer",
        "request_too_large",
    ],
)
def test_the_table_has_the_status_of_each_failure(code: str) -> None:
    error = error_of(Failed(bytes(16), 1, 0, code, ""))
    assert (error.status, error.code) in TABLE


def test_the_table_has_nothing_that_no_code_says() -> None:
    said = {text for path in SOURCES for text in constants(ast.parse(path.read_text()))}
    assert {code for _, code in TABLE} <= said
    assert len(TABLE) == len(REFUSALS)


def test_the_table_has_all_that_the_gateway_is_driven_into() -> None:
    admission = {"rate_limit_exceeded"}  # made up: the gateway passes on what admission says
    assert {(case.status, case.code) for case in CASES if case.code not in admission} <= TABLE


@pytest.mark.parametrize("kind", REFUSALS, ids=[f"{kind.status}-{kind.code}" for kind in REFUSALS])
async def test_each_arrives_in_both_shapes(kind: RefusalKind) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(kind.status, kind.code, kind.when, "field")

    assert kind.status in TYPES
    app = ErrorBoundary(refuse, lambda status: None)
    openai = await Call(app, "POST", "/v1/chat/completions").finish()
    anthropic = await Call(app, "POST", "/v1/messages").finish()
    assert openai.json() == {
        "error": {"message": kind.when, "type": kind.openai_type, "param": "field", "code": kind.code}
    }
    assert anthropic.json() == {
        "type": "error",
        "error": {"type": kind.anthropic_type, "message": kind.when},
        "request_id": anthropic.headers[b"request-id"].decode(),
    }
    for call in (openai, anthropic):
        assert call.status == kind.status
        assert (b"retry-after" in call.headers) == (kind.status in (429, 503))
