"""A TCP proxy in front of the broker that can swallow all it is sent, both ways, while connections stay open.

That is a network that has gone: nothing is refused, nothing is reset, nothing arrives.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE = 1 << 16


class BlackHole:
    """`swallows`: from now on new connections get no answer, and open ones are silent; what was swallowed
    is lost, so when it ends they are closed, as a network that comes back has forgotten them."""

    def __init__(self, port: int, broker_port: int) -> None:
        self.port, self._broker_port = port, broker_port
        self.swallows = False
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        try:
            yield
        finally:
            server.close()
            self._close_all()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def swallow(self, seconds: float) -> None:
        self.swallows = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self.swallows = False
            self._close_all()

    def _close_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        self._open.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._broker_port)
        except OSError:
            writer.transport.abort()
            self._open.discard(writer)
            return
        self._open.add(back)
        ways = [
            asyncio.create_task(self._carry(reader, back)),
            asyncio.create_task(self._carry(there, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            for end in (writer, back):
                end.transport.abort()
                self._open.discard(end)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE):
                if not self.swallows:
                    writer.write(piece)
                    await writer.drain()
