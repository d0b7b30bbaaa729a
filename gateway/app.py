"""The gateway's HTTP application: which path leads where."""

from collections.abc import Awaitable, Callable

from starlette.routing import Route, Router

from gateway.api import (
    anthropic_messages,
    health,
    kept_responses,
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
from gateway.serving import Serving
from schemas.api.messages import COUNT_TOKENS_URL
from schemas.api.prepare import CHAT_COMPLETIONS_URL, COMPLETIONS_URL, GENERATE_URL, MESSAGES_URL
from schemas.api.responses import RESPONSES_URL
from schemas.api.tokenize import DETOKENIZE_URL, TOKENIZE_URL

Handler = Callable[[Serving, Exchange], Awaitable[None]]


class _Endpoint:
    """A handler as an ASGI application: it writes its own response, no object in between."""

    def __init__(self, handler: Handler, serving: Serving) -> None:
        self._handler = handler
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._serving, scope["exchange"])


def make_app(serving: Serving) -> ErrorBoundary:
    """The ASGI application."""
    table: list[tuple[str, str, Handler]] = [
        ("POST", GENERATE_URL, native.generate),
        ("POST", CHAT_COMPLETIONS_URL, openai_chat.chat_completions),
        ("POST", COMPLETIONS_URL, openai_completions.completions),
        ("POST", RESPONSES_URL, openai_responses.create),
        ("GET", f"{RESPONSES_URL}/{{id}}", kept_responses.retrieve),
        ("DELETE", f"{RESPONSES_URL}/{{id}}", kept_responses.delete),
        ("POST", f"{RESPONSES_URL}/{{id}}/cancel", kept_responses.cancel),
        ("GET", f"{RESPONSES_URL}/{{id}}/input_items", kept_responses.input_items),
        ("POST", MESSAGES_URL, anthropic_messages.messages),
        ("POST", COUNT_TOKENS_URL, anthropic_messages.count_tokens),
        ("POST", TOKENIZE_URL, tokenize.tokenize),
        ("POST", DETOKENIZE_URL, tokenize.detokenize),
        ("GET", "/v1/streams/{id}", streams.read_stream),
        ("DELETE", "/v1/streams/{id}", streams.cancel_stream),
        ("POST", "/v1/streams/{id}/token", stream_tokens.create_token),
        ("GET", MODELS_URL, models.list_models),
        ("GET", f"{MODELS_URL}/{{model:path}}", models.get_model),
        ("GET", "/health/live", health.live),
        ("GET", "/health/ready", health.ready),
        ("GET", "/metrics", health.metrics),
    ]
    routes = [Route(path, _Endpoint(handler, serving), methods=[method]) for method, path, handler in table]
    return ErrorBoundary(Router(routes, redirect_slashes=False), serving.metrics.on_status)
