"""/health/live, /health/ready and /metrics of a worker."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


def make_app(why_not_ready: Callable[[], str], registry: CollectorRegistry) -> Starlette:
    """`why_not_ready` is empty once the worker serves, else it says what is missing."""

    async def live(request: Request) -> Response:
        return PlainTextResponse("ok")

    async def ready(request: Request) -> Response:
        reason = why_not_ready()
        return PlainTextResponse(reason, 503) if reason else PlainTextResponse("ok")

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/metrics", metrics),
        ]
    )


class HttpServer(uvicorn.Server):
    """uvicorn inside a loop that is somebody else's: it takes no signals and binds before it serves."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        """Raises OSError when the address cannot be bound."""
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        self._socket = socket.create_server((host, port))
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])

    async def run_until_stopped(self) -> None:
        """Serves until `should_exit` is set or this is cancelled."""
        try:
            await self.serve(sockets=[self._socket])
        except asyncio.CancelledError:
            self.force_exit = True
            await self.shutdown(sockets=[self._socket])
            raise
        finally:
            self._socket.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
