"""A store that is begun when it is first asked for: once for all that ask meanwhile, anew when it failed."""

import asyncio

import pytest

from gateway.stores import _Kept


class Store:
    def __init__(self, gate: asyncio.Event, error: Exception | None = None) -> None:
        self.gate, self.error = gate, error
        self.failed = self.stopped = False

    async def start(self) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def made() -> list[Store]:
    return []


def kept(made: list[Store], gate: asyncio.Event, *errors: Exception | None) -> _Kept[Store]:
    rest = list(errors)

    def make() -> Store:
        made.append(Store(gate, rest.pop(0) if rest else None))
        return made[-1]

    return _Kept(make, lambda store: store.failed)


async def test_those_that_ask_while_it_begins_get_the_same(made: list[Store]) -> None:
    gate = asyncio.Event()
    one = kept(made, gate)
    asking = [asyncio.create_task(one.get()) for _ in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()  # who goes takes it from nobody
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    assert await asking[1] is await asking[2] is await one.get() is made[0]
    assert len(made) == 1


async def test_a_start_that_fails_is_told_to_all_and_tried_again_by_the_next(made: list[Store]) -> None:
    gate = asyncio.Event()
    one = kept(made, gate, OSError("away"))
    asking = [asyncio.create_task(one.get()) for _ in range(2)]
    await asyncio.sleep(0)
    gate.set()
    for each in asking:
        with pytest.raises(OSError, match="away"):
            await each
    assert made[0].stopped
    assert await one.get() is made[1]


async def test_one_that_failed_is_stopped_and_replaced(made: list[Store]) -> None:
    gate = asyncio.Event()
    gate.set()
    one = kept(made, gate)
    first = await one.get()
    first.failed = True
    assert await one.get() is made[1]
    assert first.stopped
    await one.close()
    assert made[1].stopped
