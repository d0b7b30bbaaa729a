"""/health/live, /health/ready and /metrics, and any other app, in the loop of the service they speak for."""

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 picks one. Raises OSError that names the address."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot serve HTTP on {host}:{port}: {error.strerror}") from None
    return sock


class HttpServer(uvicorn.Server):
    """Serves `app` until `should_exit`; signals are the service's own matter."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def health_app(
    not_ready: Callable[[], str | None], registry: CollectorRegistry, routes: Iterable[Route] = ()
) -> Starlette:
    """`not_ready` says why, or None. `routes` are the service's own."""

    async def live(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_: Request) -> Response:
        reason = not_ready()
        return PlainTextResponse("ok\n" if reason is None else f"{reason}\n", 200 if reason is None else 503)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/metrics", metrics),
            *routes,
        ]
    )
