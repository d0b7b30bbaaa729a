"""A server that answers every request with the events of a chat completion at once, made beforehand.

Run as `python -m infra.benchmarks.sse_stub PORT`. Nothing lies behind it: what it costs is HTTP.
"""

import asyncio
import itertools
import random
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn

from gateway import sse
from infra.local.paths import PROJECT_ROOT
from infra.local.ports import choose_port
from schemas.records import Completion

_START_S = 20.0
_STOP_S = 10.0
_LOOK_S = 0.1
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')


async def _answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
    body = (await receive())["body"]
    found = _MAX_TOKENS.search(body)
    tokens = int(found[1]) if found else 1
    frames = sse.ChatFrames(bytes(16), "stub", 0, True)
    await send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
    await send({"type": "http.response.body", "body": frames.first(), "more_body": True})
    for position in range(tokens):
        await send({"type": "http.response.body", "body": frames.text("x", position), "more_body": True})
        # Another stream's turn, as it would be between engine steps.
        await asyncio.sleep(0)
    end = Completion(bytes(16), 1, 0, 0, 1, 0, tokens, "length")
    await send({"type": "http.response.body", "body": frames.done(end)})


@asynccontextmanager
async def sse_stub() -> AsyncIterator[tuple[str, int]]:
    """(URL, process id), while it runs. Raises TimeoutError when it does not start."""
    port = choose_port(random.Random())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name, str(port), cwd=PROJECT_ROOT, start_new_session=True
    )
    try:
        async with asyncio.timeout(_START_S):
            await _listening(port)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        async with asyncio.timeout(_STOP_S):
            await process.wait()


async def _listening(port: int) -> None:
    for attempt in itertools.count():
        await asyncio.sleep(_LOOK_S if attempt else 0)
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return


if __name__ == "__main__":
    uvicorn.run(
        _answer, port=int(sys.argv[1]), loop="uvloop", http="httptools", access_log=False, log_level="error"
    )
