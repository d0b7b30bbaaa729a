"""Work that blocks, off the event loop, in a thread that nobody waits for at the end."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """`function()`, in a thread that does not hold up the process's end as an executor's would."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]  # None only if T allows it

    def call() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = function()
        except BaseException as caught:
            error = caught
        loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=call, name="load", daemon=True).start()
    return await result
