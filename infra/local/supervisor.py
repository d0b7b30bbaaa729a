"""Runs children in waves: all start together, and the waves stop one after another, the last one first."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NoReturn

from infra.local.child import Child

_WATCH_S = 0.1


class Supervisor:
    """Owns children from their start to their end.

    Invariant: every child that was started is in exactly one wave until `stop` has ended it.
    """

    def __init__(self) -> None:
        self._waves: list[list[Child]] = []

    @property
    def children(self) -> Iterator[Child]:
        for wave in self._waves:
            yield from wave

    def child(self, name: str) -> Child:
        """Raises KeyError that lists the names."""
        for child in self.children:
            if child.name == name:
                return child
        names = ", ".join(child.name for child in self.children)
        raise KeyError(f"no child is called {name!r}: there are {names or 'none'}")

    async def start(self, *waves: Iterable[Child]) -> None:
        """Starts the children of all `waves` at the same time and returns when all are ready.

        Raises the first ChildError; the rest of these waves is stopped then, what ran before runs on.
        """
        new = [list(wave) for wave in waves]
        names = Counter(child.name for wave in (*self._waves, *new) for child in wave)
        if doubled := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"children with the same name: {', '.join(doubled)}")
        self._waves += new
        starts = [asyncio.ensure_future(child.start()) for wave in new for child in wave]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            for wave in reversed(new):
                await self._stop_wave(wave)
                self._waves.remove(wave)
            raise

    async def restart(self, name: str) -> None:
        """Stops the child if it runs, and starts it again. Raises KeyError, ChildError."""
        child = self.child(name)
        await child.stop()
        await child.start()

    async def stop(self) -> None:
        """Ends every child, last wave first. All are gone afterwards, also when this is cancelled."""
        try:
            while self._waves:
                await self._stop_wave(self._waves[-1])
                self._waves.pop()
        finally:
            for child in reversed(list(self.children)):
                child.kill()
            self._waves.clear()

    def check_alive(self) -> None:
        """Raises ChildDiedError for the first child that ended without being asked to."""
        for child in self.children:
            child.check_alive()

    async def watch(self) -> NoReturn:
        """Never returns; raises ChildDiedError within 0.1 s of a child's unexpected end."""
        while True:
            self.check_alive()
            await asyncio.sleep(_WATCH_S)

    @staticmethod
    async def _stop_wave(wave: list[Child]) -> None:
        await asyncio.gather(*(child.stop() for child in wave))
