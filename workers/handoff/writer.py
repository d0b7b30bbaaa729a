"""Writes one rank's KV to decode workers, in threads of its own: one for each run of decode, so that one that
stands still holds up no other, and none ever holds the engine's."""

import threading
import time

from schemas.records import Reserved
from workers.handoff.kv_pool import KVPool
from workers.handoff.transport import Transport
from workers.handoff.write_lane import Chunk, Job, WriteCounters, WriteEvents, WriteLane, WriteLimits
from workers.handoff.write_plan import targets

_DEFAULT_LIMITS = WriteLimits()


class Writer:
    """All methods may be called from any thread and do not wait, but for `close`."""

    def __init__(
        self, pool: KVPool, transport: Transport, events: WriteEvents, limits: WriteLimits = _DEFAULT_LIMITS
    ) -> None:
        """The pool's memory is registered with the transport already."""
        self.counters = WriteCounters()
        self._pool = pool
        self._transport = transport
        self._events = events
        self._limits = limits
        self._lock = threading.Lock()
        self._lanes: dict[tuple[int, int], WriteLane] = {}
        self._jobs: dict[bytes, WriteLane] = {}

    def start(self, reserved: Reserved, block_ids: list[int], num_tokens: int, until: float) -> None:
        """Begins a transfer of `num_tokens` tokens, without those that decode has, from blocks `block_ids`.
        What is not written by `until` (s of the monotonic clock) fails.

        Raises ValueError if it runs already.
        """
        job = Job(reserved, block_ids, num_tokens, targets(reserved), until)
        run = (reserved.decode_slot, reserved.decode_epoch)
        with self._lock:
            if reserved.transfer_id in self._jobs:
                raise ValueError(f"transfer {reserved.transfer_id.hex()} is written already")
            lane = self._lanes.get(run)
            if lane is None:
                lane = self._lanes[run] = self._new_lane(reserved.decode_slot)
            self._jobs[reserved.transfer_id] = lane
        lane.add(job)

    def computed(self, transfer_id: bytes, tokens: range, layers: range) -> None:
        """The KV of these tokens lies in the source blocks, in these layers: from now on it may be read."""
        computed_at = time.monotonic()

        def add(job: Job) -> None:
            unknown = range(max(tokens.start, job.reserved.num_cached_tokens), tokens.stop)
            if unknown:
                job.chunks.append(Chunk(unknown, layers, computed_at))

        if lane := self._lane_of(transfer_id):
            lane.change(transfer_id, add)

    def complete(self, transfer_id: bytes) -> None:
        """All was computed: `written` comes when it is there."""
        if lane := self._lane_of(transfer_id):
            lane.change(transfer_id, lambda job: setattr(job, "is_complete", True))

    def stop(self, transfer_id: bytes) -> None:
        """No more calls for it: `closed` comes when none runs, unless `written` has come already."""
        if lane := self._lane_of(transfer_id):
            lane.change(transfer_id, lambda job: setattr(job, "stopping", True))

    def forget(self, decode_slot: int, decode_epoch: int) -> None:
        """That run of decode is over: its thread ends when its transfers have."""
        with self._lock:
            lane = self._lanes.pop((decode_slot, decode_epoch), None)
        if lane is not None:
            lane.end()

    def close(self) -> None:
        """Returns when no call runs, which the transport bounds. No last words are said."""
        with self._lock:
            lanes = [*self._lanes.values(), *self._jobs.values()]
            self._lanes.clear()
        for lane in lanes:
            lane.end(now=True)
        for lane in lanes:
            lane.join()

    @property
    def num_open(self) -> int:
        """Transfers about which the last word was not said."""
        with self._lock:
            return len(self._jobs)

    def _new_lane(self, slot: int) -> WriteLane:
        return WriteLane(
            f"kv-writer-{slot}",
            self._pool,
            self._transport,
            self._events,
            self._limits,
            self.counters,
            self._over,
            self._has_no_jobs,
        )

    def _lane_of(self, transfer_id: bytes) -> WriteLane | None:
        with self._lock:
            return self._jobs.get(transfer_id)

    def _over(self, transfer_id: bytes) -> None:
        with self._lock:
            del self._jobs[transfer_id]

    def _has_no_jobs(self, lane: WriteLane) -> bool:
        with self._lock:
            return lane not in self._jobs.values()
