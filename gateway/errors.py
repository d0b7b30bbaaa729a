"""Every refusal leaves here, with an x-request-id, in the shape of the API it was asked of: Anthropic's under
/v1/messages and where its clients ask for models, elsewhere OpenAI's. Stack traces go to the log alone.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException

from gateway.exchange import JSON, ClientGoneError, Exchange, Receive, Scope, Send
from schemas.api.errors import ApiError
from schemas.api.prepare import MESSAGES_URL
from schemas.record_size import is_too_large

log = logging.getLogger(__name__)

MODELS_URL = "/v1/models"
_ANTHROPIC_VERSION = b"anthropic-version"
_RETRY_LATER = frozenset({429, 503})
_DEFAULT_RETRY_MS = 1_000


def internal_error() -> ApiError:
    return ApiError(500, "internal_error", "the gateway failed; the request id finds it in the log")


def broker_unavailable() -> ApiError:
    return ApiError(503, "broker_unavailable", "Kafka does not answer; try again", None, 1_000)


def not_queued(error: Exception, field: str, what: str) -> ApiError:
    """Of a record that the broker did not ack; `field` is the one that makes such records large."""
    if is_too_large(error):
        message = f"{field}: {what} is larger than a record of the log may be"
        return ApiError(413, "request_too_large", message, field)
    return ApiError(503, "broker_unavailable", f"{what} could not be queued; try again", None, 1_000)


def from_http(error: HTTPException, scope: Scope) -> ApiError:
    """What the router raises."""
    if error.status_code == 404:
        return ApiError(404, "not_found", f"there is nothing at {scope['path']}")
    return ApiError(error.status_code, "http_error", error.detail)


async def send_error(
    exchange: Exchange, error: ApiError, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """The whole response of a refusal; 429 and 503 always say when to come back."""
    extra = [*_headers(error), *headers]
    if error.status == 408 or exchange.awaits_continue:
        # Whether the rest of the body comes, or the next request, nobody knows.
        extra.append((b"connection", b"close"))
    anthropic_id = exchange.request_id if is_anthropic(exchange) else None
    await exchange.respond(error.status, error.to_json(anthropic_id), extra)


def whole_refusal(error: ApiError, path: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of the refusal of what is no request; the connection closes with it."""
    request_id = secrets.token_bytes(16)
    body = error.to_json(request_id if _under_messages(path) else None)
    return [
        *_headers(error),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.hex().encode()),
        (b"connection", b"close"),
    ], body


def _headers(error: ApiError) -> list[tuple[bytes, bytes]]:
    headers = [JSON]
    retry_after = error.retry_after_s()
    if retry_after is None and error.status in _RETRY_LATER:
        retry_after = _DEFAULT_RETRY_MS // 1000
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % retry_after))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def is_anthropic(exchange: Exchange) -> bool:
    """An answer has Anthropic's shape. /v1/models is a path of both APIs."""
    path: str = exchange.scope["path"]
    if path == MODELS_URL or path.startswith(f"{MODELS_URL}/"):
        return _ANTHROPIC_VERSION in exchange.headers
    return _under_messages(path)


def _under_messages(path: str) -> bool:
    return path == MESSAGES_URL or path.startswith(f"{MESSAGES_URL}/")


class ErrorBoundary:
    """The outermost ASGI application: puts the Exchange into `scope["exchange"]`, turns errors into answers.

    `on_status(status)` is told each answer's status; 499 where the client left before any.
    """

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], on_status: Callable[[int], None]
    ) -> None:
        self._app = app
        self._on_status = on_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        if is_anthropic(exchange):
            exchange.extra_headers.append((b"request-id", exchange.request_id.hex().encode()))
        scope["exchange"] = exchange
        scope["app"] = self  # has the router raise instead of answering in plain text
        try:
            await self._answer(exchange, scope, receive, send)
        finally:
            self._on_status(exchange.status or 499)

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        headers: tuple[tuple[bytes, bytes], ...] = ()
        try:
            await self._app(scope, receive, send)
            return
        except ApiError as e:
            error = e
        except ClientGoneError:
            return
        except HTTPException as e:
            error = from_http(e, scope)
            headers = tuple((k.lower().encode(), v.encode()) for k, v in (e.headers or {}).items())
        except Exception:
            log.exception("a handler failed", extra={"request_id": exchange.request_id.hex()})
            error = internal_error()
        if exchange.started:
            # Only closing the connection is left; uvicorn does that for an exception.
            raise RuntimeError(f"failed after the response had started: {error.code}")
        await send_error(exchange, error, headers)
