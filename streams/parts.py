"""What a running process consists of: how its parts are started, watched and undone."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from socket import socket
from typing import Any

from streams.http import HttpServer

_CLOSE_TIMEOUT_S = 3.0
_STOP_FAUST_S = 5.0


class Parts:
    """Each part leaves behind, on `stack`, how it is undone; a stop runs these from the last to the first."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """A task whose end is the end of the process."""
        task = asyncio.create_task(coroutine, name=name)
        self.tasks.append(task)
        self.stack.push_async_callback(_cancel, task)

    def serve(self, name: str, sock: socket, app: Any) -> None:
        server = HttpServer(app)
        task = asyncio.create_task(server.serve(sockets=[sock]), name=name)
        self.tasks.append(task)
        self.stack.push_async_callback(_stop_http, server, task)

    async def open(self, start: Callable[[], Awaitable[Any]], stop: Callable[[], Awaitable[Any]]) -> None:
        """Awaits `start`. `stop` is tried later, but not for long, also if `start` fails."""
        self.stack.push_async_callback(_close, stop, _CLOSE_TIMEOUT_S)
        await start()

    async def start_faust(self, app: Any) -> None:
        """The caller sets a deadline."""
        self.stack.push_async_callback(_close, app.stop, _STOP_FAUST_S)
        app.finalize()
        await app.start()
        self.spawn("faust", _watch(app))


async def run_parts(
    start: Callable[[Parts], Coroutine[Any, Any, None]],
    stop: asyncio.Event,
    on_stopping: Callable[[], None],
) -> None:
    """Until `stop`, which may also come while `start` waits. Raises what ended a part before."""
    async with AsyncExitStack() as stack:
        parts = Parts(stack)
        stopped = asyncio.create_task(stop.wait(), name="stop")
        stack.callback(stopped.cancel)
        starting = asyncio.create_task(start(parts), name="start")
        await asyncio.wait([stopped, starting], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            on_stopping()
            await _cancel(starting)
            return
        starting.result()
        await asyncio.wait([stopped, *parts.tasks], return_when=asyncio.FIRST_COMPLETED)
        on_stopping()
        failed = next((task for task in parts.tasks if task.done()), None)
        if failed is not None:
            failed.result()
            raise RuntimeError(f"{failed.get_name()} ended by itself")


async def _cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


async def _close(stop: Callable[[], Awaitable[Any]], timeout_s: float) -> None:
    # Closing hangs while the broker is away, or raises the CancelledError of a fetch (`stop_client`); nothing
    # that matters is left to it by now.
    with suppress(asyncio.CancelledError, Exception):
        async with asyncio.timeout(timeout_s):
            await stop()


async def _stop_http(server: HttpServer, task: "asyncio.Task[Any]") -> None:
    server.should_exit = True
    with suppress(Exception):
        await asyncio.wait_for(task, _CLOSE_TIMEOUT_S)


async def _watch(app: Any) -> None:
    await app.wait_until_stopped()
    raise app.crash_reason or RuntimeError("Faust stopped by itself")
