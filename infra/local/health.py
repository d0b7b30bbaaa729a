"""Asks a service on this machine whether it is ready."""

import asyncio

from infra.local.child import Probe

READY_PATH = "/health/ready"
LIVE_PATH = "/health/live"


def http_ready(port: int, path: str = READY_PATH, timeout_s: float = 2.0) -> Probe:
    """A probe that is True when `GET path` on 127.0.0.1 answers 200, and False on anything else."""

    async def probe() -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await _status(port, path) == 200
        except (OSError, TimeoutError, ValueError, IndexError):
            return False

    return probe


async def _status(port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        status_line = await reader.readline()
        return int(status_line.split()[1])
    finally:
        writer.close()
