"""What both sides of transfers have in common. Pure."""

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, Protocol, TypeVar

from schemas.stream_state import Run
from workers.handoff.effects import Effect
from workers.handoff.states import Event, State
from workers.handoff.transfer import Over, Transfer


class HasTransfer(Protocol):
    transfer: Transfer


T = TypeVar("T", bound=HasTransfer)


class Side(ABC, Generic[T]):
    """`_live`: transfers that are not over, or hold blocks. `peer_gone`: why they end when the peer does."""

    __slots__ = ()
    peer_gone: ClassVar[str]
    _live: dict[bytes, T]
    _over: Over

    @abstractmethod
    def _handle(self, live: T, event: Event, now: float, reason: str = "") -> list[Effect]: ...

    @abstractmethod
    def tick(self, now: float) -> list[Effect]:
        """What the clock makes due."""

    @abstractmethod
    def next_due(self) -> float | None:
        """When `tick` has something to do next."""

    @property
    def num_live(self) -> int:
        """Transfers that are not over, or hold blocks."""
        return len(self._live)

    def peers(self) -> set[Run]:
        """The other sides' runs of these."""
        return {live.transfer.peer for live in self._live.values()}

    def state(self, transfer_id: bytes) -> State | None:
        """Of a transfer that is not forgotten yet."""
        live = self._live.get(transfer_id)
        return None if live is None else live.transfer.state

    def on_failed(self, transfer_id: bytes, reason: str, now: float) -> list[Effect]:
        """Something is wrong with it here: the transport, the engine, the bytes, or its blocks are needed."""
        return self._named(transfer_id, Event.FAILED, now, reason)

    def cancel(self, transfer_id: bytes, reason: str, now: float) -> list[Effect]:
        """Nobody wants it any more."""
        return self._named(transfer_id, Event.CANCELLED, now, reason)

    def on_gone(self, run: Run, now: float) -> list[Effect]:
        """A run is over: it left, was superseded or is silent."""
        self._over.note(run)
        effects: list[Effect] = []
        for live in [each for each in self._live.values() if each.transfer.peer == run]:
            effects += self._handle(live, Event.PEER_GONE, now, self.peer_gone)
        return effects

    def _named(self, transfer_id: bytes, event: Event, now: float, reason: str = "") -> list[Effect]:
        live = self._live.get(transfer_id)
        return [] if live is None else self._handle(live, event, now, reason)
