"""What each operation of the API takes and answers, as far as no struct and no table says it.

openapi.py makes the document of it.
"""

from typing import Any

from gateway.api.admin import TENANTS_URL
from gateway.api.admin_models import ADMIN_MODELS_URL
from gateway.api.files import ORDERS, PURPOSES
from gateway.api.stream_tokens import TokenBody
from gateway.openapi_described import (
    ALWAYS,
    COUNT,
    RUNNING,
    TEXT,
    WITH_BODY,
    WITH_KEY,
    Described,
    answer_object,
    json_object,
    list_of,
    one,
)
from schemas.api.bodies import ChatCompletionBody, GenerateBody
from schemas.api.completions import CompletionBody
from schemas.api.messages import COUNT_TOKENS_URL, CountTokensBody, MessagesBody
from schemas.api.model_admin import ModelOffer
from schemas.api.prepare import CHAT_COMPLETIONS_URL, COMPLETIONS_URL, GENERATE_URL, MESSAGES_URL
from schemas.api.responses import RESPONSES_URL, ResponsesBody
from schemas.api.tenant_admin import NewKey, NewTenant, TenantChange
from schemas.api.tokenize import DETOKENIZE_URL, TOKENIZE_URL, DetokenizeBody, TokenizeBody

OPENAPI_URL = "/openapi.json"
_OPENAI_MODEL = answer_object("created", id=TEXT, object=one("model"), owned_by=TEXT, max_model_len=COUNT)
_ANTHROPIC_MODEL = answer_object("created_at", id=TEXT, type=one("model"), display_name=TEXT)
STATUS = answer_object(status=TEXT)
_RESPONSE = answer_object(
    "created_at", "error", "usage", "model", id=TEXT, object=one("response"), status=TEXT, output=list_of({})
)


# Of one event: tools take the schema of a stream for that of each.
EVENT = {
    **json_object("id", "data", id=TEXT, event=TEXT, data={**TEXT, "contentMediaType": "application/json"}),
    "description": "Server-sent events. An event's id is what Last-Event-ID goes on behind.",
}


_GENERATES = (*ALWAYS, *WITH_KEY, *WITH_BODY, *RUNNING)
_COMPUTES = (*ALWAYS, *WITH_KEY, *WITH_BODY)
_READS = (*ALWAYS, *WITH_KEY, *RUNNING)
_ADMIN = (*ALWAYS, 401, 404)
_TENANT = answer_object(
    "allowed_models",
    "budget",
    "spend",
    object=one("tenant"),
    name=TEXT,
    version=COUNT,
    tier=TEXT,
    weight={"type": "number"},
    disabled={"type": "boolean"},
    limits={"type": "object"},
    keys=list_of(answer_object(key_id=TEXT, created_at=COUNT)),
)
_OFFERED_MODEL = answer_object(object=one("model"), id=TEXT, fallback_models=list_of(TEXT), version=COUNT)
_TENANT_WITH_KEY = {**_TENANT, "required": [*_TENANT["required"], "key"]}
_NEW_TENANT = {
    **_TENANT_WITH_KEY,
    "properties": {**_TENANT["properties"], "kafka": answer_object(user=TEXT, password=TEXT)},
}
_RUN_HEADERS = ("X-Headrace-Detach", "X-Headrace-Start", "Idempotency-Key", "traceparent")
_USAGE = answer_object(input_tokens=COUNT, cached_tokens=COUNT, output_tokens=COUNT)
_OPENAI_USAGE = answer_object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)

DESCRIBED: dict[tuple[str, str], Described] = {
    ("POST", GENERATE_URL): Described(
        "Generate text",
        answer_object("stop_reason", id=TEXT, model=TEXT, text=TEXT, usage=_USAGE),
        GenerateBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
        runs=True,
    ),
    ("POST", CHAT_COMPLETIONS_URL): Described(
        "Chat, as OpenAI's API has it",
        answer_object(
            "created",
            id=TEXT,
            object=one("chat.completion"),
            model=TEXT,
            choices=list_of(
                answer_object("finish_reason", "logprobs", index=COUNT, message={"type": "object"})
            ),
            usage=_OPENAI_USAGE,
        ),
        ChatCompletionBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
        runs=True,
    ),
    ("POST", COMPLETIONS_URL): Described(
        "Complete prompts, as OpenAI's API has it",
        answer_object(
            "created",
            id=TEXT,
            object=one("text_completion"),
            model=TEXT,
            choices=list_of(answer_object("finish_reason", "logprobs", index=COUNT, text=TEXT)),
            usage=_OPENAI_USAGE,
        ),
        CompletionBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
        runs=True,
    ),
    ("POST", RESPONSES_URL): Described(
        "Create a response, as OpenAI's API has it",
        _RESPONSE,
        ResponsesBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
        runs=True,
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
        statuses=(*ALWAYS, *WITH_KEY, 405),
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
            type=one("message"),
            role=one("assistant"),
            model=TEXT,
            content=list_of(answer_object("type")),
            usage=json_object("input_tokens", "output_tokens"),
        ),
        MessagesBody,
        sse=True,
        parameters=_RUN_HEADERS,
        statuses=_GENERATES,
        runs=True,
    ),
    ("POST", COUNT_TOKENS_URL): Described(
        "Count the tokens of messages",
        answer_object(input_tokens=COUNT),
        CountTokensBody,
        statuses=_COMPUTES,
    ),
    ("POST", TOKENIZE_URL): Described(
        "Text to token ids",
        answer_object(count=COUNT, max_model_len=COUNT, tokens=list_of(COUNT)),
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
        "End a request", answer_object(id=TEXT, object=one("stream"), status=TEXT), status=202
    ),
    ("POST", "/v1/streams/{id}/token"): Described(
        "Make a URL that reads a stream without a key",
        answer_object(object=one("stream.token"), token=TEXT, expires_at=COUNT, url=TEXT),
        TokenBody,
        statuses=_COMPUTES,
        body_required=False,
    ),
    ("GET", "/v1/models"): Described(
        "List the models, as OpenAI's API has it; with `anthropic-version` as Anthropic's",
        {
            "anyOf": [
                answer_object(object=one("list"), data=list_of(_OPENAI_MODEL)),
                answer_object(
                    "first_id", "last_id", has_more={"type": "boolean"}, data=list_of(_ANTHROPIC_MODEL)
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
        answer_object(object=one("list"), data=list_of(_TENANT)),
        statuses=_ADMIN,
        admin=True,
    ),
    ("POST", TENANTS_URL): Described(
        "Make a tenant; its API key is told once, and where Kafka asks for a login that of its clients",
        _NEW_TENANT,
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
        answer_object(object=one("tenant"), name=TEXT, deleted={"const": True}),
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
    ("GET", ADMIN_MODELS_URL): Described(
        "List the models that were offered while all run",
        answer_object(object=one("list"), data=list_of(_OFFERED_MODEL)),
        statuses=_ADMIN,
        admin=True,
    ),
    ("PUT", f"{ADMIN_MODELS_URL}/{{model}}"): Described(
        "Offer a model of the catalogue, and say which serve for it under overload",
        _OFFERED_MODEL,
        ModelOffer,
        parameters=("If-Match",),
        statuses=(*_ADMIN, 412, 413),
        admin=True,
        body_required=False,
    ),
    ("DELETE", f"{ADMIN_MODELS_URL}/{{model}}"): Described(
        "Take the offer of a model back",
        answer_object(object=one("model"), id=TEXT, deleted={"const": True}),
        parameters=("If-Match",),
        statuses=(*_ADMIN, 412),
        admin=True,
    ),
    ("GET", "/health/live"): Described("This process runs", STATUS, statuses=ALWAYS, public=True),
    ("GET", "/health/ready"): Described(
        "Requests may be sent here; 503 with the reasons if not", STATUS, statuses=ALWAYS, public=True
    ),
    ("GET", "/metrics"): Described("Prometheus metrics", None, statuses=ALWAYS, public=True),
    ("GET", OPENAPI_URL): Described(
        "This document", answer_object("paths", openapi=TEXT), statuses=ALWAYS, public=True
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
    "after": {"in": "query", "schema": TEXT},
    "order": {"in": "query", "schema": {"enum": list(ORDERS)}},
    "purpose": {"in": "query", "schema": {"enum": list(PURPOSES)}},
    "after_id": {"in": "query", "schema": TEXT},
    "before_id": {"in": "query", "schema": TEXT},
}
