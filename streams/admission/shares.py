"""How several admission processes share a worker's room: by what each has queued, the higher class first.

Each process says in its heartbeat how many tokens wait with it, by model and class. Where nobody else
queues, all room is one's own, so a lone busy tenant gets the fleet. Whoever queues a class lower than what
another queues for the model takes nothing. Of one class, each gets a part of what is free that is as its
queue to all queues, in whole seats: by systematic sampling (Madow, Madow: "On the theory of systematic
sampling", Ann. Math. Stat. 15, 1944), whose starting point all processes compute from the same heartbeat.
So the parts add up to what is free and not more, and who has a small part of one seat gets it now and then.

Figures of others are up to 100 ms old: what is given too often then waits at the worker, whose block pool
is the hard ceiling.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import floor

from schemas.records import Heartbeat

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Share:
    """`own` of `total` tokens that wait, those of lower admission slots being `below`."""

    below: int
    own: int
    total: int

    def of(self, room: int, worker_slot: int, heard_at: int) -> int:
        """How much of a worker's `room` is this process's; `heard_at`: broker time of its heartbeat."""
        if room <= 0 or not self.own:
            return 0
        start = _point(worker_slot, heard_at)
        end = floor(room * (self.below + self.own) / self.total + start)
        return end - floor(room * self.below / self.total + start)


NOTHING = Share(0, 0, 1)


class PeerDemand:
    """What other processes have queued, by their last heartbeats."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._queued: dict[int, dict[tuple[str, int], int]] = {}
        self._below: dict[tuple[str, int], int] = {}
        self._all: dict[tuple[str, int], int] = {}
        self._highest: dict[str, int] = {}

    def heard(self, heartbeat: Heartbeat) -> None:
        """A heartbeat of another process."""
        if heartbeat.slot == self._slot:
            return  # an earlier life of this one
        queued: dict[tuple[str, int], int] = {}
        for status in heartbeat.partitions:
            for waiting in status.queued:
                key = (waiting.model, waiting.priority)
                queued[key] = queued.get(key, 0) + max(0, waiting.tokens)
        if queued != self._queued.get(heartbeat.slot, {}):
            self._queued[heartbeat.slot] = queued
            self._sum()

    def retain(self, slots: Collection[int]) -> None:
        """Forgets processes in other slots than these: they are gone."""
        gone = self._queued.keys() - set(slots)
        if gone:
            for slot in gone:
                del self._queued[slot]
            self._sum()

    def share(self, model: str, priority: int, own_tokens: int) -> Share | None:
        """Of the room at the model's workers, for a class of which `own_tokens` wait here. None: all."""
        highest = self._highest.get(model)
        if highest is None or highest > priority:
            return None
        if highest < priority:
            return NOTHING
        key = (model, priority)
        return Share(self._below.get(key, 0), own_tokens, self._all[key] + own_tokens)

    def _sum(self) -> None:
        self._below, self._all, self._highest = {}, {}, {}
        for slot, queued in self._queued.items():
            for key, tokens in queued.items():
                if not tokens:
                    continue
                model, priority = key
                self._all[key] = self._all.get(key, 0) + tokens
                if slot < self._slot:
                    self._below[key] = self._below.get(key, 0) + tokens
                self._highest[model] = min(priority, self._highest.get(model, priority))


def _point(worker_slot: int, heard_at: int) -> float:
    """A number in [0, 1) that is the same everywhere, and another one for each heartbeat."""
    mixed = (worker_slot * 0x9E3779B97F4A7C15 + heard_at * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0x94D049BB133111EB) & _MASK
    return (mixed >> 32) / (1 << 32)
