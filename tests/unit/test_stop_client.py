"""A client that stops badly harms nobody who stops it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from schemas.stop_client import stop_client


class Stubborn:
    def __init__(self, ending: Callable[[], Awaitable[None]]) -> None:
        self._ending = ending
        self.cancelled = asyncio.Event()

    async def stop(self) -> None:
        try:
            await self._ending()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def a_fetch_cancelled() -> None:
    fetch = asyncio.create_task(asyncio.sleep(60))
    fetch.cancel()
    await fetch


async def an_error() -> None:
    raise OSError("no route")


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("ending", [a_fetch_cancelled, an_error, for_ever])
async def test_no_end_of_it_ends_who_stops_it(ending: Callable[[], Awaitable[None]]) -> None:
    await asyncio.wait_for(stop_client(Stubborn(ending), 0.05), 5)


async def test_who_is_cancelled_meanwhile_hears_of_it() -> None:
    client = Stubborn(for_ever)
    stopping = asyncio.create_task(stop_client(client, 60))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await asyncio.wait_for(client.cancelled.wait(), 5)
