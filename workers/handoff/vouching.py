"""KV that was taken from another run, until its canary says that it computed right then. Pure.

A run of the canary that begins behind what was computed, and passes, vouches for it: an engine that computes
wrong goes on doing so. If one fails first, what was taken since is in doubt.
"""

from schemas.stream_state import Run
from workers.canary import NO_CANARY


class Vouching:
    def __init__(self) -> None:
        self._taken: dict[Run, dict[bytes, int]] = {}

    def take(self, transfer_id: bytes, peer: Run, canary: int) -> None:
        """`canary`: how many runs of the peer's canary had begun when the KV was computed."""
        if canary != NO_CANARY:  # else nobody will ever say
            self._taken.setdefault(peer, {})[transfer_id] = canary

    def peers(self) -> list[Run]:
        return list(self._taken)

    def passed(self, peer: Run, canary: int) -> list[bytes]:
        """The peer's run number `canary` is the last that passed: the transfers that it vouches for."""
        taken = self._taken.get(peer, {})
        vouched = [transfer_id for transfer_id, begun in taken.items() if begun < canary]
        for transfer_id in vouched:
            del taken[transfer_id]
        if not taken:
            self._taken.pop(peer, None)
        return vouched

    def over(self, peer: Run) -> list[bytes]:
        """No more is to be heard of its canary: the transfers that nobody has vouched for."""
        return list(self._taken.pop(peer, {}))
