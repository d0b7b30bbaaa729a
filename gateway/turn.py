"""How long what reads the log may have the loop to itself."""

import asyncio
import time

# The live streams' records wait no longer for one that reads what lies far behind.
_TURN_S = 0.002


class Turn:
    """Between two records let `take_turns` look at the clock. `now`: when this turn began (monotonic s)."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = time.monotonic()

    async def take_turns(self) -> None:
        """Lets others run, if this one has had its time."""
        if time.monotonic() - self.now >= _TURN_S:
            await asyncio.sleep(0)
            self.now = time.monotonic()
