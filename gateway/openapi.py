"""The OpenAPI 3.1 document of all that a gateway serves, made from what serves it.

Bodies are the msgspec structs that decode them, refusals the table that a test holds the code to.
"""

import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.api.online import MAX_TOKENS_HEADER, MODEL_HEADER
from gateway.exchange import STREAM_HEADER
from gateway.openapi_batches import DESCRIBED_BATCHES
from gateway.openapi_described import TEXT, Described, answer_object
from gateway.openapi_files import DESCRIBED_FILES
from gateway.openapi_operations import DESCRIBED, EVENT, PARAMETERS, STATUS
from gateway.rate_headers import rate_header_objects
from schemas.api.prepare import MESSAGES_URL
from schemas.api.refusals import REFUSALS

ALL_DESCRIBED = {**DESCRIBED, **DESCRIBED_FILES, **DESCRIBED_BATCHES}
_SCHEMAS = "#/components/schemas/{name}"
# Of batches, or between processes: no client of these paths is told them.
_NOT_HERE = frozenset(
    {
        "invalid_avro",
        "batch_expired",
        "undecodable_record",
        "enqueued_tokens_exceeded",
        "line_too_long",
        "unreadable_batch",
        "record_too_large",
        "duplicate_custom_id",
        "input_file_changed",
    }
)
_NOT_TO_CLIENTS = 499
# What an answer says of how it is served.
_SERVED: dict[str, Any] = {
    STREAM_HEADER.decode(): {
        "description": "Where the stream is read again, of each choice.",
        "required": True,
        "schema": TEXT,
    },
    MODEL_HEADER.decode(): {"description": "The model that serves; a fallback may.", "schema": TEXT},
    MAX_TOKENS_HEADER.decode(): {
        "description": "Output tokens at most, where there are fewer than were asked for.",
        "schema": {"type": "integer", "minimum": 1},
    },
}


@functools.cache
def openapi_json() -> bytes:
    """The document, made once."""
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for (method, path), described in ALL_DESCRIBED.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, described)
    bodies = [each.body for each in ALL_DESCRIBED.values() if each.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": "1",
            "description": "LLM inference whose every request is a record on a log. Fields that are not "
            "served are refused by name.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas, **_errors()},
            "securitySchemes": {
                "admin": {"type": "http", "scheme": "bearer", "description": "HEADRACE_ADMIN_KEY"},
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(method: str, path: str, described: Described) -> dict[str, Any]:
    in_path = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": described.summary,
        "parameters": [{"name": name, **PARAMETERS[name]} for name in (*in_path, *described.parameters)],
        "security": _security(described),
        "responses": _responses(path, described),
    }
    if described.body is not None:
        schema = {"$ref": _SCHEMAS.format(name=described.body.__name__)}
        operation["requestBody"] = {
            "required": described.body_required,
            "content": {"application/json": {"schema": schema}},
        }
    if described.form is not None:
        operation["requestBody"] = {
            "required": described.body_required,
            "content": {"multipart/form-data": {"schema": described.form}},
        }
    return operation


def _security(described: Described) -> list[dict[str, list[str]]]:
    if described.public:
        return []
    return [{"admin": []}] if described.admin else [{"bearer": []}, {"x-api-key": []}]


def _responses(path: str, described: Described) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status in sorted({*described.statuses, described.status} - {200, 201, 202}):
        found[str(status)] = _refusal(path, status)
    content: dict[str, Any] = {}
    if described.answer is not None:
        content["application/json"] = {"schema": described.answer}
    if described.sse:
        content["text/event-stream"] = {"schema": EVENT}
    if described.jsonl:
        content["application/x-jsonl"] = {"schema": TEXT}
    if path == "/metrics":
        content["text/plain"] = {"schema": TEXT}
    if content:
        found[str(described.status)] = {"description": described.summary, "content": content}
    if described.runs:
        limits = rate_header_objects(anthropic=path.startswith(MESSAGES_URL))
        found[str(described.status)]["headers"] = limits | _SERVED
        found["429"]["headers"] |= limits
    if path == "/health/ready":
        # Who asks is a load balancer, and not told in the form of an API.
        found["503"] = {"description": "not ready", "content": {"application/json": {"schema": STATUS}}}
    return found


def _refusal(path: str, status: int) -> dict[str, Any]:
    kinds = [kind for kind in REFUSALS if kind.status == status and kind.code not in _NOT_HERE]
    shapes = [f"Error{status}"]
    if path.startswith(MESSAGES_URL):
        shapes = ["AnthropicError"]
    elif path.startswith("/v1/models"):
        shapes.append("AnthropicError")
    refs = [{"$ref": _SCHEMAS.format(name=name)} for name in shapes]
    refusal: dict[str, Any] = {
        "description": "; ".join(f"`{kind.code}`: {kind.when}" for kind in kinds),
        "content": {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}},
    }
    if status in (429, 503):
        refusal["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
    return refusal


def _errors() -> dict[str, Any]:
    """A schema for each status: OpenAI's error object with the codes that there are."""
    found: dict[str, Any] = {
        "AnthropicError": answer_object(
            type={"const": "error"}, error=answer_object(type=TEXT, message=TEXT), request_id=TEXT
        )
    }
    for status in sorted({kind.status for kind in REFUSALS} - {_NOT_TO_CLIENTS}):
        found[f"Error{status}"] = answer_object(error=_error(status))
    return found


def _error(status: int) -> dict[str, Any]:
    kinds = [kind for kind in REFUSALS if kind.status == status and kind.code not in _NOT_HERE]
    codes: Iterable[str] = dict.fromkeys(kind.code for kind in kinds)
    types: Iterable[str] = dict.fromkeys(kind.openai_type for kind in kinds)
    return answer_object(
        message=TEXT,
        type={"enum": list(types)},
        param={"type": ["string", "null"]},
        code={"enum": list(codes)},
    )
