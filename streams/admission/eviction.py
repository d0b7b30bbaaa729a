"""Which dead processes are put out of the consumer group, so that their partitions move. Pure.

A static member keeps its partitions until its session ends, six seconds after it died. The fleet knows within
a second, and at once of one that left. So the lowest live process has the broker take them back then; each
life once, and none while its slot has a later one: that one finds its partitions without a rebalance.
"""

from schemas.fleet import SILENCE_MS, FleetView, Member
from streams.admission.config import ROLE

# One that was put out and woke was only held up, as on a machine that has too much to do. That it is silent
# again says less, and each time its partitions move and what waits there is sent again.
WOKEN_SILENCE_MS = 3 * SILENCE_MS

Life = tuple[int, int]


class Evictions:
    """A life is (slot, epoch)."""

    def __init__(self, slot: int, fleet: FleetView) -> None:
        self._slot = slot
        self._fleet = fleet
        self._done: set[Life] = set()
        self._woken: set[Life] = set()

    def due(self) -> list[Life]:
        """Lives that are over, if it is for this process to see to them."""
        fleet = self._fleet
        if not fleet.may_judge or min(fleet.live_slots(ROLE), default=None) != self._slot:
            return []
        over = {(member.slot, member.epoch): member for member in fleet.over(ROLE)}
        woken = self._woken | (self._done - over.keys())
        self._woken = {life for life in woken if fleet.epoch_of(ROLE, life[0]) == life[1]}
        self._done &= over.keys()
        return [
            life for life, member in over.items() if life not in self._done and self._is_dead(life, member)
        ]

    def is_over(self, slot: int, epoch: int) -> bool:
        """Whether it is still so: it did not wake, and nobody came to life in its slot since."""
        is_last = self._fleet.epoch_of(ROLE, slot) == epoch
        return is_last and self._fleet.gone(ROLE, slot, epoch) is not None

    def done(self, slot: int, epoch: int) -> None:
        """That life is no member any more."""
        self._done.add((slot, epoch))

    def _is_dead(self, life: Life, member: Member) -> bool:
        if life not in self._woken or member.left is not None:
            return True
        return self._fleet.clock.now_ms - member.last_ms >= WOKEN_SILENCE_MS
