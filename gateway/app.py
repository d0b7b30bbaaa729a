"""The gateway's HTTP application: which path leads where."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.routing import Route, Router

from gateway.api import (
    admin,
    admin_models,
    anthropic_messages,
    batches,
    description,
    files,
    health,
    kept_responses,
    message_batches,
    models,
    native,
    openai_chat,
    openai_completions,
    openai_responses,
    stream_tokens,
    streams,
    tokenize,
)
from gateway.errors import MODELS_URL, ErrorBoundary
from gateway.exchange import Exchange, Receive, Scope, Send
from gateway.http_protocol import EXCESS
from gateway.in_flight import caller
from gateway.openapi_operations import OPENAPI_URL
from gateway.serving import Serving
from schemas.api.batches import BATCHES_URL
from schemas.api.errors import ApiError
from schemas.api.message_batches import MESSAGE_BATCHES_URL
from schemas.api.messages import COUNT_TOKENS_URL
from schemas.api.prepare import CHAT_COMPLETIONS_URL, COMPLETIONS_URL, GENERATE_URL, MESSAGES_URL
from schemas.api.responses import RESPONSES_URL
from schemas.api.tokenize import DETOKENIZE_URL, TOKENIZE_URL

Handler = Callable[[Serving, Exchange], Awaitable[None]]


class Operation(NamedTuple):
    """One method of one path. `limited`: it is counted, and refused when there are too many; what watches
    this process is not."""

    method: str
    path: str
    handler: Handler
    limited: bool = True


OPERATIONS = (
    Operation("POST", GENERATE_URL, native.generate),
    Operation("POST", CHAT_COMPLETIONS_URL, openai_chat.chat_completions),
    Operation("POST", COMPLETIONS_URL, openai_completions.completions),
    Operation("POST", RESPONSES_URL, openai_responses.create),
    Operation("GET", f"{RESPONSES_URL}/{{id}}", kept_responses.retrieve),
    Operation("DELETE", f"{RESPONSES_URL}/{{id}}", kept_responses.delete),
    Operation("POST", f"{RESPONSES_URL}/{{id}}/cancel", kept_responses.cancel),
    Operation("GET", f"{RESPONSES_URL}/{{id}}/input_items", kept_responses.input_items),
    Operation("POST", MESSAGES_URL, anthropic_messages.messages),
    Operation("POST", COUNT_TOKENS_URL, anthropic_messages.count_tokens),
    Operation("POST", MESSAGE_BATCHES_URL, message_batches.create),
    Operation("GET", MESSAGE_BATCHES_URL, message_batches.list_batches),
    Operation("GET", f"{MESSAGE_BATCHES_URL}/{{id}}", message_batches.retrieve),
    Operation("DELETE", f"{MESSAGE_BATCHES_URL}/{{id}}", message_batches.delete),
    Operation("POST", f"{MESSAGE_BATCHES_URL}/{{id}}/cancel", message_batches.cancel),
    Operation("GET", f"{MESSAGE_BATCHES_URL}/{{id}}/results", message_batches.results),
    Operation("POST", BATCHES_URL, batches.create),
    Operation("GET", BATCHES_URL, batches.list_batches),
    Operation("GET", f"{BATCHES_URL}/{{id}}", batches.retrieve),
    Operation("POST", f"{BATCHES_URL}/{{id}}/cancel", batches.cancel),
    Operation("POST", TOKENIZE_URL, tokenize.tokenize),
    Operation("POST", DETOKENIZE_URL, tokenize.detokenize),
    Operation("GET", "/v1/streams/{id}", streams.read_stream),
    Operation("DELETE", "/v1/streams/{id}", streams.cancel_stream),
    Operation("POST", "/v1/streams/{id}/token", stream_tokens.create_token),
    Operation("POST", files.FILES_URL, files.upload),
    Operation("GET", files.FILES_URL, files.list_files),
    Operation("GET", f"{files.FILES_URL}/{{id}}", files.retrieve),
    Operation("DELETE", f"{files.FILES_URL}/{{id}}", files.delete),
    Operation("GET", f"{files.FILES_URL}/{{id}}/content", files.read_content),
    Operation("GET", MODELS_URL, models.list_models),
    Operation("GET", f"{MODELS_URL}/{{model:path}}", models.get_model),
    Operation("GET", admin.TENANTS_URL, admin.list_tenants),
    Operation("POST", admin.TENANTS_URL, admin.create_tenant),
    Operation("GET", f"{admin.TENANTS_URL}/{{tenant}}", admin.get_tenant),
    Operation("PATCH", f"{admin.TENANTS_URL}/{{tenant}}", admin.update_tenant),
    Operation("DELETE", f"{admin.TENANTS_URL}/{{tenant}}", admin.delete_tenant),
    Operation("POST", f"{admin.TENANTS_URL}/{{tenant}}/keys", admin.create_key),
    Operation("GET", admin_models.ADMIN_MODELS_URL, admin_models.list_offered),
    Operation("PUT", f"{admin_models.ADMIN_MODELS_URL}/{{model:path}}", admin_models.offer_model),
    Operation("DELETE", f"{admin_models.ADMIN_MODELS_URL}/{{model:path}}", admin_models.take_back_model),
    Operation("GET", "/health/live", health.live, limited=False),
    Operation("GET", "/health/ready", health.ready, limited=False),
    Operation("GET", "/metrics", health.metrics, limited=False),
    Operation("GET", OPENAPI_URL, description.openapi, limited=False),
)


class _Endpoint:
    """A path's handlers as an ASGI application: each writes its own response, no object in between."""

    def __init__(self, operations: list[Operation], serving: Serving) -> None:
        self._operations = {operation.method: operation for operation in operations}
        self._allow = ", ".join(sorted(self._operations)).encode()
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        operation = self._operations.get(scope["method"])
        if operation is None:
            exchange.extra_headers.append((b"allow", self._allow))
            message = f"{scope['method']} is not allowed here, but {self._allow.decode()}"
            raise ApiError(405, "method_not_allowed", message)
        if not operation.limited:
            await operation.handler(self._serving, exchange)
            return
        if scope.get("state", _NO_STATE).get(EXCESS):
            exchange.extra_headers.append((b"connection", b"close"))
            message = "more connections are open than this gateway serves; try again"
            raise ApiError(503, "too_many_connections", message, None, 1_000)
        with self._serving.in_flight.one(caller(exchange.headers, scope["query_string"])):
            await operation.handler(self._serving, exchange)


_NO_STATE: dict[str, object] = {}


def make_app(serving: Serving) -> ErrorBoundary:
    """The ASGI application."""
    by_path: dict[str, list[Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, []).append(operation)
    routes = [Route(path, _Endpoint(operations, serving)) for path, operations in by_path.items()]
    return ErrorBoundary(Router(routes, redirect_slashes=False), serving.metrics.on_status)
