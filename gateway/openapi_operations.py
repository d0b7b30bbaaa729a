"""What each operation of the API takes and answers, as far as no struct and no table says it.

openapi.py makes the document of it.
"""

from typing import Any, NamedTuple

import msgspec

from gateway.api.admin import TENANTS_URL
from gateway.api.stream_tokens import TokenBody
from schemas.api.bodies import ChatCompletionBody, GenerateBody
from schemas.api.completions import CompletionBody
from schemas.api.messages import COUNT_TOKENS_URL, CountTokensBody, MessagesBody
from schemas.api.prepare import CHAT_COMPLETIONS_URL, COMPLETIONS_URL, GENERATE_URL, MESSAGES_URL
from schemas.api.responses import RESPONSES_URL, ResponsesBody
from schemas.api.tenant_admin import NewKey, NewTenant, TenantChange
from schemas.api.tokenize import DETOKENIZE_URL, TOKENIZE_URL, DetokenizeBody, TokenizeBody

OPENAPI_URL = "/openapi.json"
TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_ALWAYS = (400, 408, 431, 500, 503)
_WITH_KEY = (401, 403, 404)
_WITH_BODY = (413, 415)
_RUNNING = (409, 410, 422, 429, 502, 504)


def _object(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def _one(value: str) -> dict[str, Any]:
    return {"const": value}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def answer_object(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """As `_object`, with all of `properties` required, and `required` of any type."""
    return _object(*properties, *required, **properties)


_OPENAI_MODEL = answer_object("created", id=TEXT, object=_one("model"), owned_by=TEXT, max_model_len=_COUNT)
_ANTHROPIC_MODEL = answer_object("created_at", id=TEXT, type=_one("model"), display_name=TEXT)
STATUS = answer_object(status=TEXT)
_RESPONSE = answer_object(
    "created_at", "error", "usage", "model", id=TEXT, object=_one("response"), status=TEXT, output=_list({})
)


# Of one event: tools take the schema of a stream for that of each.
EVENT = {
    **_object("id", "data", id=TEXT, event=TEXT, data={**TEXT, "contentMediaType": "application/json"}),
    "description": "Server-sent events. An event's id is what Last-Event-ID goes on behind.",
}


class Described(NamedTuple):
    """`answer`: the schema of a JSON answer, None where there is none. `sse`: it may be a stream of events.

    `parameters` are names of `PARAMETERS`; those of the path need not be named.
    """

    summary: str
    answer: dict[str, Any] | None
    body: type[msgspec.Struct] | None = None
    sse: bool = False
    parameters: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (*_ALWAYS, *_WITH_KEY)
    status: int = 200
    public: bool = False
    body_required: bool = True
    admin: bool = False


_GENERATES = (*_ALWAYS, *_WITH_KEY, *_WITH_BODY, *_RUNNING)
_COMPUTES = (*_ALWAYS, *_WITH_KEY, *_WITH_BODY)
_READS = (*_ALWAYS, *_WITH_KEY, *_RUNNING)
_ADMIN = (*_ALWAYS, 401, 404)
_TENANT = answer_object(
    "allowed_models",
    object=_one("tenant"),
    name=TEXT,
    version=_COUNT,
    tier=TEXT,
    weight={"type": "number"},
    disabled={"type": "boolean"},
    limits={"type": "object"},
    keys=_list(answer_object(key_id=TEXT, created_at=_COUNT)),
)
_TENANT_WITH_KEY = {**_TENANT, "required": [*_TENANT["required"], "key"]}
_RUN_HEADERS = ("X-Headrace-Detach", "X-Headrace-Start", "Idempotency-Key", "traceparent")
_USAGE = answer_object(input_tokens=_COUNT, cached_tokens=_COUNT, output_tokens=_COUNT)
_OPENAI_USAGE = answer_object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)

DESCRIBED: dict[tuple[str, str], Described] = {
    ("POST", GENERATE_URL): Described(
        "Generate text",
        answer_object("stop_reason", id=TEXT, model=TEXT, text=TEXT, usage=_USAGE),
        GenerateBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
    ),
    ("POST", CHAT_COMPLETIONS_URL): Described(
        "Chat, as OpenAI's API has it",
        answer_object(
            "created",
            id=TEXT,
            object=_one("chat.completion"),
            model=TEXT,
            choices=_list(
                answer_object("finish_reason", "logprobs", index=_COUNT, message={"type": "object"})
            ),
            usage=_OPENAI_USAGE,
        ),
        ChatCompletionBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
    ),
    ("POST", COMPLETIONS_URL): Described(
        "Complete prompts, as OpenAI's API has it",
        answer_object(
            "created",
            id=TEXT,
            object=_one("text_completion"),
            model=TEXT,
            choices=_list(answer_object("finish_reason", "logprobs", index=_COUNT, text=TEXT)),
            usage=_OPENAI_USAGE,
        ),
        CompletionBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
    ),
    ("POST", RESPONSES_URL): Described(
        "Create a response, as OpenAI's API has it",
        _RESPONSE,
        ResponsesBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
    ),
    ("GET", f"{RESPONSES_URL}/{{id}}"): Described(
        "Read a response again",
        _RESPONSE,
        sse=True,
        parameters=("stream", "starting_after", "X-Headrace-Detach"),
        statuses=_READS,
    ),
    ("DELETE", f"{RESPONSES_URL}/{{id}}"): Described(
        "Refused: the log keeps a response for its retention time",
        None,
        statuses=(*_ALWAYS, *_WITH_KEY, 405),
        status=405,
    ),
    ("POST", f"{RESPONSES_URL}/{{id}}/cancel"): Described("End a response", _RESPONSE, statuses=_READS),
    ("GET", f"{RESPONSES_URL}/{{id}}/input_items"): Described(
        "Refused: the input of a response is not kept", None, status=404
    ),
    ("POST", MESSAGES_URL): Described(
        "Send messages, as Anthropic's API has it",
        answer_object(
            "stop_reason",
            "stop_sequence",
            id=TEXT,
            type=_one("message"),
            role=_one("assistant"),
            model=TEXT,
            content=_list(answer_object("type")),
            usage=_object("input_tokens", "output_tokens"),
        ),
        MessagesBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
    ),
    ("POST", COUNT_TOKENS_URL): Described(
        "Count the tokens of messages",
        answer_object(input_tokens=_COUNT),
        CountTokensBody,
        statuses=_COMPUTES,
    ),
    ("POST", TOKENIZE_URL): Described(
        "Text to token ids",
        answer_object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
        TokenizeBody,
        statuses=_COMPUTES,
    ),
    ("POST", DETOKENIZE_URL): Described(
        "Token ids to text", answer_object(prompt=TEXT), DetokenizeBody, statuses=_COMPUTES
    ),
    ("GET", "/v1/streams/{id}"): Described(
        "Read a stream on or again, in the form of /v1/generate",
        None,
        sse=True,
        parameters=("Last-Event-ID", "starting_after", "token", "X-Headrace-Detach"),
        statuses=_READS,
    ),
    ("DELETE", "/v1/streams/{id}"): Described(
        "End a request", answer_object(id=TEXT, object=_one("stream"), status=TEXT), status=202
    ),
    ("POST", "/v1/streams/{id}/token"): Described(
        "Make a URL that reads a stream without a key",
        answer_object(object=_one("stream.token"), token=TEXT, expires_at=_COUNT, url=TEXT),
        TokenBody,
        statuses=_COMPUTES,
        body_required=False,
    ),
    ("GET", "/v1/models"): Described(
        "List the models, as OpenAI's API has it; with `anthropic-version` as Anthropic's",
        {
            "anyOf": [
                answer_object(object=_one("list"), data=_list(_OPENAI_MODEL)),
                answer_object(
                    "first_id", "last_id", has_more={"type": "boolean"}, data=_list(_ANTHROPIC_MODEL)
                ),
            ]
        },
        parameters=("anthropic-version", "limit", "after_id", "before_id"),
    ),
    ("GET", "/v1/models/{model}"): Described(
        "Describe a model", {"anyOf": [_OPENAI_MODEL, _ANTHROPIC_MODEL]}, parameters=("anthropic-version",)
    ),
    ("GET", TENANTS_URL): Described(
        "List the tenants",
        answer_object(object=_one("list"), data=_list(_TENANT)),
        statuses=_ADMIN,
        admin=True,
    ),
    ("POST", TENANTS_URL): Described(
        "Make a tenant; its API key is told once",
        _TENANT_WITH_KEY,
        NewTenant,
        statuses=(*_ADMIN, 409, 413),
        status=201,
        admin=True,
    ),
    ("GET", f"{TENANTS_URL}/{{tenant}}"): Described(
        "Describe a tenant", _TENANT, statuses=_ADMIN, admin=True
    ),
    ("PATCH", f"{TENANTS_URL}/{{tenant}}"): Described(
        "Change what the body names",
        _TENANT,
        TenantChange,
        parameters=("If-Match",),
        statuses=(*_ADMIN, 412, 413),
        admin=True,
        body_required=False,
    ),
    ("DELETE", f"{TENANTS_URL}/{{tenant}}"): Described(
        "Delete a tenant",
        answer_object(object=_one("tenant"), name=TEXT, deleted={"const": True}),
        parameters=("If-Match",),
        statuses=(*_ADMIN, 412),
        admin=True,
    ),
    ("POST", f"{TENANTS_URL}/{{tenant}}/keys"): Described(
        "Make another API key, in place of those there are unless the body says keep",
        _TENANT_WITH_KEY,
        NewKey,
        parameters=("If-Match",),
        statuses=(*_ADMIN, 412, 413),
        status=201,
        admin=True,
        body_required=False,
    ),
    ("GET", "/health/live"): Described("This process runs", STATUS, statuses=_ALWAYS, public=True),
    ("GET", "/health/ready"): Described(
        "Requests may be sent here; 503 with the reasons if not", STATUS, statuses=_ALWAYS, public=True
    ),
    ("GET", "/metrics"): Described("Prometheus metrics", None, statuses=_ALWAYS, public=True),
    ("GET", OPENAPI_URL): Described(
        "This document", answer_object("paths", openapi=TEXT), statuses=_ALWAYS, public=True
    ),
}

PARAMETERS: dict[str, dict[str, Any]] = {
    "id": {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},
    "tenant": {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},
    "If-Match": {"in": "header", "schema": {"type": "string", "pattern": '^("[0-9]{1,18}"|[*])$'}},
    "model": {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},
    "Last-Event-ID": {"in": "header", "schema": {"type": "integer", "minimum": -1, "maximum": 10**18 - 1}},
    "X-Headrace-Detach": {"in": "header", "schema": {"type": "number", "minimum": 0}},
    "X-Headrace-Start": {
        "in": "header",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400},
    },
    "Idempotency-Key": {"in": "header", "schema": {"type": "string", "pattern": "^[ -~]{1,255}$"}},
    "traceparent": {"in": "header", "schema": TEXT},
    "anthropic-version": {"in": "header", "schema": TEXT},
    "starting_after": {"in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}},
    "stream": {"in": "query", "schema": {"type": "boolean"}},
    "token": {"in": "query", "schema": TEXT},
    "limit": {"in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1_000}},
    "after_id": {"in": "query", "schema": TEXT},
    "before_id": {"in": "query", "schema": TEXT},
}
