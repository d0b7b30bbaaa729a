"""The HTTP server in the gateway's event loop: its settings, and the socket that it serves on."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import uvicorn

from gateway.app import make_app
from gateway.config import GatewayConfig
from gateway.http_protocol import BoundedHttpProtocol, HttpLimits
from gateway.serving import Serving

_GRACEFUL_S = 5
# Clients of a gateway that died come back all at once.
_BACKLOG = 4_096
# Longer than load balancers and SDK pools keep theirs, so that they close first.
_KEEP_ALIVE_S = 75


class HttpServer(uvicorn.Server):
    """Serves `serving`. Signals are the gateway's."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(serving),
                http=_protocol(serving),
                ws="none",
                lifespan="off",
                interface="asgi3",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACEFUL_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _protocol(serving: Serving) -> type[asyncio.Protocol]:
    config = serving.config
    limits = HttpLimits(
        head_bytes=config.max_header_bytes,
        headers=config.max_headers,
        head_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        connections=config.max_connections,
        on_status=serving.metrics.on_status,
    )
    # uvicorn calls it, as it would the class.
    return cast("type[asyncio.Protocol]", partial(BoundedHttpProtocol, limits=limits, writes=serving.writes))


def listen(config: GatewayConfig) -> socket.socket:
    """Raises OSError, with the setting to change."""
    family = socket.AF_INET6 if ":" in config.http_host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit these. Without NODELAY a token waits up to 40 ms for the last one's ack.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A client that acknowledges nothing for this long is gone.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.write_timeout_s * 1000))
    try:
        listener.bind((config.http_host, config.http_port))
    except OSError as e:
        listener.close()
        raise OSError(
            f"cannot listen on {config.http_host}:{config.http_port} (HEADRACE_HTTP_PORT): {e.strerror}"
        ) from e
    return listener
