"""Handoffs in virtual time: KV goes from prefill to decode workers layer by layer, over links of their own.

A worker sends, and receives, over a link of so many bytes a second, one thing after the other. The layers of
a step's KV come into being evenly over the step; each is sent when it is there, its predecessor has gone, and
the receiver has kept blocks for it. Records take a hop each. What is in doubt, decode computes itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from infra.simulator.measures import Flight, HandoffTimes, Measures
from schemas.records import Dispatch


class HandoffWorker(Protocol):
    """What a handoff asks of a simulated worker, each to be done when its step is over."""

    def keep_blocks(self, handoff: "Handoff", now: float) -> None:
        """Decode: takes blocks for the prompt into `handoff.blocks` if there are any, and calls `on_kept`."""

    def adopt(self, handoff: "Handoff", now: float) -> None:
        """Decode: goes on with the request from its first token on."""

    def compute_whole(self, handoff: "Handoff", now: float) -> None:
        """Decode: gives kept blocks back, and computes the request from its prompt on."""

    def give_back(self, handoff: "Handoff", now: float) -> None:
        """Decode: frees kept blocks."""

    def let_go(self, handoff: "Handoff", now: float) -> None:
        """Prefill: ends what it still computes of the request, and frees its blocks."""


@dataclass(slots=True)
class Link:
    """One way in or out of a worker (bytes/s). `free_at`: when what was put on it has gone."""

    bytes_per_s: float
    free_at: float = 0.0


def sent_at(
    out: Link, into: Link, num_bytes: float, num_layers: int, began: float, ended: float, not_before: float
) -> float:
    """Puts the KV of a step from `began` to `ended` on both links; when its last layer is there.

    Layer i of L is computed at began + i c, c = (ended - began) / L, and takes t. So the last one has gone at
    the maximum over i of (max(not_before, began + i c) + (L - i + 1) t), which is at i = 1 or i = L, and when
    what was on the link before has gone and then all of this.
    """
    computing = (ended - began) / num_layers
    gone = 0.0
    for link in (out, into):
        whole = num_bytes / link.bytes_per_s
        gone = max(gone, max(link.free_at, not_before, began + computing) + whole, ended + whole / num_layers)
        link.free_at = gone
    return gone


@dataclass(slots=True, eq=False)
class Handoff:
    """One attempt on its way. `blocks` are kept at decode, `source_blocks` held at prefill until decode has
    the request. KV of `num_tokens` was computed; `unsent`: (bytes, began, ended) of steps whose KV waits for
    decode's blocks.
    """

    dispatch: Dispatch
    flight: Flight
    prefill_epoch: int
    decode_epoch: int
    prefill: HandoffWorker
    decode: HandoffWorker
    first_token_id: int
    blocks: list[int] = field(default_factory=list)
    source_blocks: list[int] = field(default_factory=list)
    unsent: list[tuple[float, float, float]] = field(default_factory=list)
    num_bytes: float = 0.0
    sends_from: float | None = None
    last_byte_at: float = 0.0
    computed_at: float | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    is_over: bool = False

    @property
    def request_id(self) -> bytes:
        return self.dispatch.request.request_id


class Handoffs:
    """All of a fleet, on their way. `at(time, call)` calls in virtual time; a record takes `hop_s`."""

    def __init__(
        self, measures: Measures, hop_s: float, at: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._measures = measures
        self._hop_s = hop_s
        self._at = at
        self._out: dict[int, Link] = {}
        self._into: dict[int, Link] = {}
        self._num_layers: dict[int, int] = {}
        self._open: dict[bytes, Handoff] = {}

    def add_worker(self, epoch: int, bytes_per_s: float, num_layers: int) -> None:
        self._out[epoch], self._into[epoch] = Link(bytes_per_s), Link(bytes_per_s)
        self._num_layers[epoch] = num_layers

    def get(self, request_id: bytes) -> Handoff | None:
        return self._open.get(request_id)

    def begin(self, handoff: Handoff, now: float) -> None:
        """Prefill has read the Dispatch, and offers it to decode."""
        self._open[handoff.request_id] = handoff
        self._later(now, self._offered, handoff)

    def on_kept(self, handoff: Handoff, now: float) -> None:
        """Decode keeps blocks; or has none, and computes the request itself."""
        if handoff.blocks:
            self._later(now, self._may_send, handoff)
        else:
            self._close(handoff)
            handoff.decode.compute_whole(handoff, now)
            self._later(now, self._let_go, handoff)

    def computed(self, handoff: Handoff, num_bytes: float, began: float, ended: float, *, last: bool) -> None:
        """A step at prefill computed a part of the prompt; the `last` one, with the first token."""
        handoff.unsent.append((num_bytes, began, ended))
        if last:
            handoff.computed_at = ended
        self._send(handoff, ended)

    def end(self, handoff: Handoff, now: float) -> None:
        """The request ended at prefill: decode is not needed."""
        self._close(handoff)
        self._later(now, self._give_back, handoff)

    def lost(self, epoch: int, now: float) -> None:
        """A run is gone, and whoever it dealt with knows."""
        for handoff in list(self._open.values()):
            if handoff.decode_epoch == epoch:
                self._close(handoff)
                handoff.prefill.let_go(handoff, now)
            elif handoff.prefill_epoch == epoch:
                self._close(handoff)
                handoff.decode.compute_whole(handoff, now)
        for known in (self._out, self._into, self._num_layers):
            known.pop(epoch, None)

    def _later(self, now: float, call: Callable[[Handoff, float], None], handoff: Handoff) -> None:
        at = now + self._hop_s
        self._at(at, partial(call, handoff, at))

    def _offered(self, handoff: Handoff, now: float) -> None:
        if not handoff.is_over:
            handoff.decode.keep_blocks(handoff, now)

    def _may_send(self, handoff: Handoff, now: float) -> None:
        if not handoff.is_over:
            handoff.sends_from = now
            self._send(handoff, now)

    def _send(self, handoff: Handoff, now: float) -> None:
        if handoff.sends_from is None or handoff.is_over:
            return
        out, into = self._out[handoff.prefill_epoch], self._into[handoff.decode_epoch]
        layers = self._num_layers[handoff.prefill_epoch]
        for num_bytes, began, ended in handoff.unsent:
            handoff.num_bytes += num_bytes
            handoff.last_byte_at = sent_at(out, into, num_bytes, layers, began, ended, handoff.sends_from)
        handoff.unsent.clear()
        if handoff.computed_at is not None:
            at = max(now, handoff.last_byte_at) + self._hop_s
            self._at(at, partial(self._received, handoff, at))

    def _received(self, handoff: Handoff, now: float) -> None:
        if handoff.is_over:
            return
        assert handoff.computed_at is not None
        self._close(handoff)
        visible_s = handoff.last_byte_at - handoff.computed_at
        self._measures.handoffs.append(
            HandoffTimes(handoff.computed_at, handoff.num_bytes, visible_s, now - handoff.computed_at)
        )
        handoff.decode.adopt(handoff, now)
        self._later(now, self._let_go, handoff)

    def _let_go(self, handoff: Handoff, now: float) -> None:
        handoff.prefill.let_go(handoff, now)

    def _give_back(self, handoff: Handoff, now: float) -> None:
        handoff.decode.give_back(handoff, now)

    def _close(self, handoff: Handoff) -> None:
        handoff.is_over = True
        if self._open.get(handoff.request_id) is handoff:
            del self._open[handoff.request_id]
