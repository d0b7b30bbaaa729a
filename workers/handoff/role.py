"""What workers of both roles do alike with the handoffs of a run. All in the event loop."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from schemas.fleet import FleetEvent, FleetView
from schemas.handoff_records import Message, WorkerRole
from schemas.kv_layout import KVLayout
from schemas.records import Cancellation, Dispatch, WorkerStatus
from schemas.stream_state import Run
from workers.handoff.effects import Effect, Send
from workers.handoff.sender import HandoffSender
from workers.handoff.side import Side
from workers.live_requests import End, LiveRequest
from workers.request import Request, RequestOutput


class Host(Protocol):
    """What the rest of the worker does for requests of handoffs."""

    def take(self, dispatch: Dispatch, traceparent: str | None) -> tuple[LiveRequest, End | None] | None:
        """Makes it a live request of this run; see `LiveRequests.on_dispatch`."""

    def is_cancelled(self, dispatch: Dispatch) -> bool:
        """Nobody wants it any more."""

    @property
    def canaries_begun(self) -> int:
        """Runs of this worker's canary so far; -1: it has none."""

    def disown(self, request: Request) -> None:
        """What it has told is taken for wrong: it ends, and its owner hears why. Nothing if it has ended."""

    def prepare(self, live: LiveRequest) -> None:
        """`on_prepared` or `on_unprepared` follows, maybe at once."""

    def end(self, live: LiveRequest, end: End) -> None:
        """Tells its owner the end of a request that never came into the engine."""


class HandoffRole(ABC):
    """Messages, the engine's and the transport's words, and time go to a side of the protocol; its effects
    are carried out. `counts`: how often what became of them, since the start."""

    role: WorkerRole

    def __init__(
        self,
        run: Run,
        layout: KVLayout,
        side: Side[Any],
        sender: HandoffSender,
        fleet: FleetView,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.layout = layout
        self.counts: Counter[str] = Counter()
        self._side = side
        self._sender = sender
        self._fleet = fleet
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    @property
    def num_live(self) -> int:
        """Transfers that are not over, or hold blocks."""
        return self._side.num_live

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks here that another run may still write to, though its transfer is over."""
        return 0

    @property
    def is_idle(self) -> bool:
        """Nothing of it holds up the end of the run."""
        return self._sender.is_empty

    @property
    def bytes_per_s(self) -> float:
        """At which it sends KV; 0: it has not yet."""
        return 0.0

    def tell(self, status: WorkerStatus) -> None:
        """Puts into a heartbeat what handoffs add to it."""
        status.kv_layout = self.layout
        status.transfer_bytes_per_s = self.bytes_per_s

    def on_message(self, message: Message, traceparent: str | None) -> None:
        """What lies on `inference.decode` for this slot."""
        self._do(self._received(message, traceparent))

    def on_pairing(self, dispatch: Dispatch, traceparent: str | None) -> bool:
        """A dispatch that names a decode run. False: it is served here."""
        return False

    @abstractmethod
    def on_prepared(self, request: Request) -> bool:
        """It may run. False for a request of no handoff: then it is the caller's."""

    @abstractmethod
    def on_unprepared(self, request: Request, end: End) -> bool:
        """It cannot run. True if nobody is to be told."""

    def on_output(self, output: RequestOutput) -> bool:
        """What the engine gave for a request that is not live. False: not for a handoff of this run."""
        return False

    def on_cancellation(self, cancellation: Cancellation) -> None:
        """Whatever it is about."""
        run = (cancellation.slot, cancellation.epoch)
        if run in ((None, None), (self.run.slot, self.run.epoch)):
            self._cancel(cancellation.request_id, cancellation.attempt)

    @abstractmethod
    def on_whole(self, dispatch: Dispatch) -> None:
        """The request is to be served here in another way: its handoffs of this and lower attempts end."""

    def on_fleet_event(self, event: FleetEvent, offset: int) -> None:
        """In the order of the log."""
        self._fleet.on_event(event, offset)
        self.on_fleet_change()

    def on_fleet_change(self) -> None:
        """The fleet's log says something new: maybe of a run that KV comes from, or goes to."""
        now = self._clock()
        for peer in self._side.peers():
            self._do(self._look_at(peer, now))

    def check(self, now: float) -> None:  # noqa: B027  # most have nothing to check
        """Raises an error that must end the run. To be called several times a second."""

    def halt(self) -> None:
        """Nothing more is said, or done, from now on. `close` still follows."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._sender.halt()

    async def close(self) -> None:
        """No message, timer or write of this run follows."""
        self.halt()
        await self._sender.close()

    @abstractmethod
    def _cancel(self, request_id: bytes, attempt: int) -> None:
        """Ends this and lower attempts, as far as the engine does not have them."""

    @abstractmethod
    def _received(self, message: Message, traceparent: str | None) -> list[Effect]: ...

    @abstractmethod
    def _perform(self, effect: Effect) -> None: ...

    def _gone(self, peer: Run) -> str:
        """Why a run is over, by the log; nothing if it may live."""
        return self._fleet.gone("worker", peer.slot, peer.epoch) or ""

    def _look_at(self, peer: Run, now: float) -> list[Effect]:
        return self._side.on_gone(peer, now) if self._gone(peer) else []

    def _do(self, effects: Iterable[Effect]) -> None:
        """Carries them out in order, and looks when time has something to do next."""
        if self._is_closed:
            return
        for effect in effects:
            if isinstance(effect, Send):
                self._sender.send(effect)
            else:
                self._perform(effect)
        self._arm()

    def _call_soon(self, handle: Callable[..., Iterable[Effect]], *args: object) -> None:
        """From another thread: what comes of `handle` is done in the event loop."""
        try:
            self._loop.call_soon_threadsafe(self._handle, handle, args)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return

    def _handle(self, handle: Callable[..., Iterable[Effect]], args: tuple[object, ...]) -> None:
        if not self._is_closed:  # a side must not move on when its effects are not carried out
            self._do(handle(*args))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._side.next_due()
        if due is not None:
            self._timer = self._loop.call_later(max(0.0, due - self._clock()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._do(self._side.tick(self._clock()))
