"""How a client of aiokafka is stopped, whatever its brokers do."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Client(Protocol):
    def stop(self) -> Coroutine[Any, Any, None]: ...


async def stop_client(client: Client, timeout_s: float) -> None:
    """Returns within `timeout_s`, and raises nothing but what its own task is cancelled with.

    While the broker is away a producer's `stop` flushes for ever, and a consumer's (aiokafka 0.14) raises the
    CancelledError of a fetch that it cancelled: in the task that called it, that would pass for its own, end
    it without a word, and end with it what it was to begin anew.
    """
    stopping = asyncio.create_task(client.stop())
    try:
        await asyncio.wait([stopping], timeout=timeout_s)
    finally:
        if not stopping.done():
            stopping.cancel()
            stopping.add_done_callback(_look)
    if not stopping.done():
        log.warning("a Kafka client did not stop in time", extra={"client": type(client).__name__})
    elif not stopping.cancelled() and (error := stopping.exception()) is not None:
        log.warning("a Kafka client did not stop in order", extra={"error": repr(error)})


def _look(stopping: "asyncio.Task[None]") -> None:
    # So that nobody is told of an exception that was never looked at.
    if not stopping.cancelled():
        stopping.exception()
