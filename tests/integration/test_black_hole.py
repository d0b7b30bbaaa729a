"""The proxy that swallows: nothing arrives, nothing is refused, and afterwards all must connect again."""

import asyncio
import random
from contextlib import suppress

import pytest

from infra.chaos_run.black_hole import BlackHole
from infra.local.ports import choose_port


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionResetError):
        while piece := await reader.read(1024):
            writer.write(piece)
    writer.transport.abort()


async def test_it_carries_swallows_and_carries_again() -> None:
    rng = random.Random()
    port, proxy = choose_port(rng), choose_port(rng)
    server = await asyncio.start_server(_echo, "127.0.0.1", port)
    hole = BlackHole(proxy, port)
    async with server, hole.running():
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy)
        writer.write(b"before")
        assert await asyncio.wait_for(reader.readexactly(6), 5) == b"before"
        swallowing = asyncio.create_task(hole.swallow(0.3))
        await asyncio.sleep(0)
        writer.write(b"during")
        fresh, other = await asyncio.open_connection("127.0.0.1", proxy)
        other.write(b"too")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(reader.read(1), fresh.read(1)), 0.15)
        await swallowing
        for broken in (reader, fresh):
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(broken.read(1), 5) == b""
        for closed in (writer, other):
            closed.close()
        again, writer = await asyncio.open_connection("127.0.0.1", proxy)
        writer.write(b"after")
        assert await asyncio.wait_for(again.readexactly(5), 5) == b"after"
        writer.close()
        await writer.wait_closed()
