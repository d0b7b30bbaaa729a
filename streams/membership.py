"""Who this process is in the fleet, and what it hears of the others."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from schemas import topics
from schemas.codec import encode
from schemas.fleet import FleetView, Producer, join
from schemas.records import Drain, Heartbeat, Join, Left, PartitionStatus, Shedding, Unpaired
from streams.consumer import decoded

log = logging.getLogger(__name__)

_LEAVE_S = 3.0


class SupersededError(RuntimeError):
    """A younger process has this slot."""


def _nobody(_: Heartbeat) -> None: ...


def _nothing() -> None: ...


class Membership:
    """Feeds `view`. From `join` on, a higher epoch in this slot raises SupersededError.

    `on_peer(heartbeat)`: of another process of this role, or an earlier life of this one. `on_change()`:
    once for each batch of records.
    """

    def __init__(
        self,
        role: str,
        slot: int,
        view: FleetView,
        on_peer: Callable[[Heartbeat], None] = _nobody,
        on_change: Callable[[], None] = _nothing,
    ) -> None:
        self.view = view
        self.heard_itself = False
        self._role, self._slot = role, slot
        self._on_peer, self._on_change = on_peer, on_change
        self._own: Heartbeat | None = None

    @property
    def epoch(self) -> int:
        return self.heartbeat().epoch

    def heartbeat(
        self, partitions: Iterable[PartitionStatus] = (), coordinator_shards: Iterable[int] = ()
    ) -> Heartbeat:
        """A sign of this life. Raises RuntimeError before `join`."""
        own = self._own
        if own is None:
            raise RuntimeError(f"{self._role} {self._slot} has not joined the fleet")
        return Heartbeat(
            own.role,
            own.slot,
            own.epoch,
            own.nonce,
            own.address,
            partitions=list(partitions),
            coordinator_shards=list(coordinator_shards),
        )

    async def join(self, producer: Producer, address: str) -> None:
        """Gives this life its epoch. The caller sets a deadline."""
        epoch, nonce = await join(producer, self._role, self._slot, address)
        self._own = Heartbeat(self._role, self._slot, epoch, nonce, address)
        self.view.watch_as(self._role, self._slot, epoch)
        self._check_slot()
        log.info("joined", extra={"epoch": epoch, "address": address})

    async def leave(self, producer: Producer) -> None:
        """Says so, if the broker hears it; else silence will."""
        left = encode(Left(self._role, self._slot, self.epoch, "stopped"))
        with suppress(Exception):
            async with asyncio.timeout(_LEAVE_S):
                await producer.send_and_wait(topics.EVENTS, left, partition=0)

    def on_heartbeats(self, records: Iterable[Any]) -> None:
        """A batch of fleet.heartbeats."""
        for record in records:
            heartbeat = decoded(record, Heartbeat)
            if heartbeat is not None:
                self.view.on_heartbeat(heartbeat, record.timestamp)
                if heartbeat.role == self._role:
                    self._on_own_role(heartbeat)
        self._check_slot()
        self._on_change()

    def on_events(self, records: Iterable[Any]) -> None:
        """A batch of fleet.events."""
        for record in records:
            event = decoded(record, Join, Drain, Left, Shedding, Unpaired)
            if event is not None and not isinstance(event, Shedding | Unpaired):
                self.view.on_event(event, record.offset)
        self._check_slot()
        self._on_change()

    def _on_own_role(self, heartbeat: Heartbeat) -> None:
        own = self._own
        if own is not None and (heartbeat.slot, heartbeat.epoch) == (own.slot, own.epoch):
            self.heard_itself = True
        else:
            self._on_peer(heartbeat)

    def _check_slot(self) -> None:
        newest = self.view.epoch_of(self._role, self._slot)
        if self._own is not None and newest is not None and newest > self._own.epoch:
            raise SupersededError(f"epoch {newest} has slot {self._slot}, this process is {self._own.epoch}")
