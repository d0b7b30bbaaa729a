"""Which owners are lost, and which gateway slots are empty, as one gateway sees it. Pure."""

from schemas.fleet import FleetView

ROLE = "gateway"
# Who has heard nothing of a slot for this long, while others are heard, knows that it is empty.
_UNHEARD_MS = 3_000


class SlotWatch:
    """The watcher is the gateway (slot, epoch). Times are on the log's clock, in milliseconds."""

    def __init__(self, view: FleetView, slot: int, epoch: int, succession_ms: int) -> None:
        self._view = view
        self._slot = slot
        self._epoch = epoch
        self._succession_ms = succession_ms
        self._since = view.clock.now_ms

    def lost(self, slot: int, epoch: int) -> bool:
        """Whether that life of a slot is over."""
        if slot == self._slot:
            return epoch < self._epoch
        if self._view.gone(ROLE, slot, epoch) is not None:
            return True
        heard = self._view.epoch_of(ROLE, slot)
        never_heard = heard is None or heard < epoch
        return never_heard and self._view.may_judge and self.empty_ms(slot) >= _UNHEARD_MS

    def heard_ms(self, slot: int) -> int | None:
        """When the slot was last heard; None if never by this watcher."""
        return self._view.heard_ms(ROLE, slot)

    def empty_ms(self, slot: int) -> int:
        """How long nothing was heard of the slot, as far as this watcher can say."""
        return self._view.clock.now_ms - max(self._since, self.heard_ms(slot) or 0)

    def is_empty(self, slot: int) -> bool:
        return all(member.slot != slot for member in self._view.live(ROLE))

    def is_vacant(self, slot: int) -> bool:
        """Empty for so long that its next life is not waited for any more."""
        if slot == self._slot or not self.is_empty(slot):
            return False
        return self.empty_ms(slot) >= self._succession_ms

    def to_see_to(self, num_slots: int) -> set[int]:
        """The vacant slots, if they fall to this gateway: it is the lowest that lives."""
        live = [member.slot for member in self._view.live(ROLE)]
        if not live or live[0] != self._slot:
            return set()
        empty = set(range(num_slots)).difference(live)
        return {slot for slot in empty if self.empty_ms(slot) >= self._succession_ms}
