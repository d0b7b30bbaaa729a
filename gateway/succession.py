"""No request is left without an end: what a lost gateway owned goes over to another (architecture §4).

- The next life of a slot claims all that the last one left open.
- A gateway where a client reads the stream of a lost owner claims that one at once.
- When a slot has been empty for `succession_s`, the lowest live gateway claims all that is open there.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from gateway.config import GatewayConfig
from gateway.estate import FORGET_MS, Estate, Found
from gateway.following import COMMIT_S, Following, oldest_open
from gateway.log_scans import LogScans
from gateway.outbox import Outbox
from gateway.owner import Owner
from gateway.reply_offsets import ReplyOffsets
from gateway.request_lookup import RequestLookup
from gateway.slot_watch import SlotWatch
from schemas import topics
from schemas.fleet import FleetView
from schemas.records import Cancellation, Tokens
from schemas.stream_state import ReplyRecord

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_COMMIT_TIMEOUT_S = 5.0
_READ_S = 10.0


class Succession:
    """Runs beside the owner, in the same loop. `own` are the requests of earlier lives of this slot.

    `own_position(partition)`: in a reply partition of this slot, what lies before it was given.
    `at_own_end()` returns when all that lies there was.
    """

    def __init__(
        self,
        config: GatewayConfig,
        owner: Owner,
        view: FleetView,
        scans: LogScans,
        outbox: Outbox,
        decode: Callable[[ConsumerRecord], Awaitable[object]],
        own_offsets: ReplyOffsets,
        own_position: Callable[[int], int],
        at_own_end: Callable[[], Awaitable[None]],
    ) -> None:
        self.own = Estate(owner.slot, owner)
        self._config = config
        self._succession_ms = int(config.succession_s * 1000)
        self._slots = SlotWatch(view, owner.slot, owner.epoch, self._succession_ms)
        self._owner = owner
        self._view = view
        self._scans = scans
        self._outbox = outbox
        self._decode = decode
        self._own_offsets = own_offsets
        self._own_position = own_position
        self._at_own_end = at_own_end
        self._lookup = RequestLookup(config.kafka, decode)
        self._followed: dict[int, tuple[Following, asyncio.Task[None]]] = {}
        self.draining = False
        self._since = view.clock.now_ms
        # Slots that were seen to, with when they had last been heard.
        self._seen_to: dict[int, int | None] = {}

    def on_own_record(self, record: object, message: ConsumerRecord) -> None:
        """Any record of this slot's reply partitions, after the owner was given it."""
        # Nearly all are tokens of our own: those are looked at no further.
        if type(record) is Tokens and self._owner.open.keys() >= set(record.request_ids):
            return
        if isinstance(record, Tokens | ReplyRecord | Cancellation):
            clock_ms = self._view.clock.now_ms
            actions = self.own.on_record(
                record, message.partition, message.offset, message.timestamp, clock_ms
            )
            if actions:
                self._outbox.put(actions)

    @property
    def own_settled(self) -> bool:
        """Nothing is left of earlier lives of this slot, and late records need not be expected."""
        idle_since = max(self._since, self.own.fed_clock)
        return not self.own.any_open and self._view.clock.now_ms - idle_since >= FORGET_MS

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        commit_at = loop.time()
        try:
            # What the last life left open may have ended further on.
            await self._until_own_end()
            while True:
                # One that was stopped may commit past what its slot's next life has open.
                awake = self._owner.feel(time.monotonic())
                if awake and loop.time() >= commit_at:
                    commit_at = loop.time() + COMMIT_S
                    await self.commit()
                if awake and self._view.may_judge and not self.draining:
                    self._choose()
                    await self._take_over()
                await asyncio.sleep(_LOOK_S)
        finally:
            tasks = [task for _, task in self._followed.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._lookup.stop()

    async def _until_own_end(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_READ_S):
                    await self._at_own_end()
                return
            except (TimeoutError, KafkaError) as e:
                log.warning("still reading what this slot's last life left", extra={"error": repr(e)})

    async def at_end(self) -> None:
        """Returns when all that lies in the partitions of other slots that are followed was given.

        The caller sets a deadline. Raises KafkaError.
        """
        for following, _ in list(self._followed.values()):
            await following.at_end()

    def _choose(self) -> None:
        wanted = set(self._slots_read_here())
        wanted |= self._slots.to_see_to(self._config.gateway_slots)
        for slot in wanted - self._followed.keys() - {self._owner.slot}:
            if slot not in self._seen_to or self._seen_to[slot] != self._slots.heard_ms(slot):
                self._follow(slot)
        for slot, (following, task) in list(self._followed.items()):
            if slot in wanted and not self._is_done(following):
                continue
            if any(topics.shard_of(o.request.reply_partition) == slot for o in self._owner.open.values()):
                continue
            task.cancel()
            del self._followed[slot]
            if slot in wanted:
                self._seen_to[slot] = self._slots.heard_ms(slot)
            log.info("a slot is no longer followed", extra={"gateway_slot": slot})

    def _is_done(self, following: Following) -> bool:
        estate = following.estate
        quiet = self._view.clock.now_ms - estate.fed_clock >= FORGET_MS
        return following.caught_up and quiet and not estate.any_open

    def _follow(self, slot: int) -> None:
        estate = Estate(slot, self._owner)
        estate.fed_clock = self._view.clock.now_ms
        following = Following(
            self._config.kafka,
            estate,
            self._owner,
            self._outbox,
            self._decode,
            lambda: self._view.clock.now_ms,
            lambda: self._slots.is_empty(slot),
        )
        log.info("following the slot of a lost gateway", extra={"gateway_slot": slot})
        self._followed[slot] = following, asyncio.create_task(following.run())

    async def _take_over(self) -> None:
        clock_ms = self._view.clock.now_ms
        read_here = {fold.request_id for fold in self._scans.followed()}
        estates = [(self.own, True, True)]
        estates += [(f.estate, self._slots.is_vacant(s), f.caught_up) for s, (f, _) in self._followed.items()]
        for estate, everything, caught_up in estates:
            estate.forget(clock_ms)
            if not caught_up:
                continue  # its end may lie further on
            due = estate.due(
                self._view,
                read_here=read_here,
                everything=everything,
                lost=self._slots.lost,
                clock_ms=clock_ms,
            )
            kept_ms = 0 if everything and estate is not self.own else self._succession_ms
            for found in sorted(due, key=lambda found: found.state.request_at or (0, 0)):
                await self._take(estate, found, kept_ms)

    async def _take(self, estate: Estate, found: Found, kept_ms: int) -> None:
        state, request = found.state, found.request
        assert state.request_at is not None
        try:
            if request is None:
                place = await self._lookup.find(state.request_id, *state.request_at)
                request, found.traceparent = (None, None) if place is None else place
        except (TimeoutError, KafkaError) as e:
            log.warning("a request cannot be read back; again", extra={"error": repr(e)})
            return
        extra = {"request_id": state.request_id, "from_epoch": state.owner_epoch, "attempt": state.attempt}
        if request is None:
            log.error("a request was not found where admission read it", extra=extra)
        actions = estate.take(found, request, self._view.clock.now_ms, kept_ms)
        if found.settled and actions:
            log.info("billing a request of a lost gateway, which may have been billed", extra=extra)
        elif actions:
            log.info("taking over a request of a lost gateway", extra=extra)
        self._outbox.put(actions)

    async def commit(self) -> None:
        """Where a successor would have to begin. Once a second, and before the slot is left."""
        offsets: dict[TopicPartition, int] = {
            partition: oldest_open(
                partition.partition, self._own_position(partition.partition), self._owner, self.own
            )
            for partition in self._own_offsets.partitions
        }
        try:
            async with asyncio.timeout(_COMMIT_TIMEOUT_S):
                await self._own_offsets.commit(offsets)
        except (TimeoutError, KafkaError) as e:
            log.warning("offsets could not be committed; again", extra={"error": repr(e)})

    def _slots_read_here(self) -> Iterator[int]:
        """Slots where a stream lies that is read here and whose owner is lost."""
        for fold in self._scans.followed():
            state, slot = fold.state, topics.shard_of(fold.partition)
            owner_slot = slot if state.owner_slot is None else state.owner_slot
            if state.owner_epoch is not None and self._slots.lost(owner_slot, state.owner_epoch):
                yield slot
