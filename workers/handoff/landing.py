"""How long until bytes that were sent to a process have landed in it: in time that it runs. Pure.

While a process stands still (stopped, or its machine paused), what was sent to it lies in its sockets, and
lands when it goes on: a clock that ran meanwhile says nothing.
"""

from dataclasses import dataclass

# Who looks so often and finds that more than twice as much has passed stood still in between, or may have.
LOOK_S = 0.1


@dataclass(slots=True)
class Landing:
    """`left_s` of running are to pass. `seen_at` is the caller's clock (s) at the last look."""

    left_s: float
    seen_at: float

    def is_over(self, now: float) -> bool:
        """To be asked at `next_look`. Asked later, it takes longer."""
        self.left_s -= min(now - self.seen_at, 2 * LOOK_S)
        self.seen_at = now
        return self.left_s <= 1e-9

    @property
    def next_look(self) -> float:
        return self.seen_at + min(self.left_s, LOOK_S)
