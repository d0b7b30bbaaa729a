"""What a process learns before it admits on a partition that it took over. Pure.

The holder before knew what each tenant had running. The new one asks: by its takeover offset in the heartbeat
(takeover.py), to which each owner answers with a Restate. The last minute of inference.usage tells what was
used since. When all live owners have answered and the rows are read, or it has waited long enough, all of it
is put into the limits in the order in which it was let in, so buckets come to where they were.

Exact, but for the requests of owners that were silent for `restate_wait_ms`; what they say later still
counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas import topics
from schemas.fleet import FleetView
from schemas.priority import PriorityClass
from schemas.records import Restate, RestatedRequest, Usage
from schemas.usage_rank import usage_rank
from streams.admission.limits import Limits

# Owners hear of the takeover with the heartbeat, as this process does, and answer within 200 ms.
RESTATE_WAIT_MS = 500
# A minute of rows at the rate of one process takes a second to read.
USAGE_WAIT_MS = 2_000
# Its own heartbeat does not come back: it waits no longer, of these times, for answers to it.
_ANNOUNCE_WAITS = 3
ANNOUNCE_WAIT_MS = _ANNOUNCE_WAITS * RESTATE_WAIT_MS

GATEWAY, LEDGER = "gateway", "ledger"


@dataclass(slots=True)
class _Rebuild:
    """`heard`: (role, slot, epoch) of owners that answered, `restated`: requests and when they were told."""

    takeover_offset: int
    since: int
    announced_at: int | None = None
    usage_is_read: bool = False
    heard: set[tuple[str, int, int]] = field(default_factory=set)
    restated: list[tuple[int, RestatedRequest]] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Opened:
    """A partition on which requests are admitted from now on: after how long, and what was told."""

    partition: int
    waited_ms: int
    num_owners: int
    num_restated: int
    num_usages: int


class Restating:
    """`is_open` says whether requests of a partition may be admitted. Times are ms of the epoch."""

    def __init__(self, limits: Limits) -> None:
        self.restate_wait_ms = RESTATE_WAIT_MS
        self._limits = limits
        self._offsets: dict[int, int] = {}
        self._rebuilds: dict[int, _Rebuild] = {}

    def hold(self, takeover_offsets: Iterable[tuple[int, int]], now: int) -> None:
        """(partition, takeover offset) of all that is held now; what was not, or was taken anew, is shut."""
        held = dict(takeover_offsets)
        for partition in self._offsets.keys() - held.keys():
            self._rebuilds.pop(partition, None)
        for partition, offset in held.items():
            if self._offsets.get(partition) != offset:
                self._rebuilds[partition] = _Rebuild(offset, now)
        self._offsets = held

    def is_open(self, partition: int) -> bool:
        return partition not in self._rebuilds

    @property
    def all_open(self) -> bool:
        return not self._rebuilds

    def on_restate(self, restate: Restate, partition: int, now: int) -> None:
        """An owner's answer; one to another takeover is none."""
        if self._offsets.get(partition) != restate.takeover_offset:
            return
        told = [r for r in restate.requests if r.priority == topics.priority_of(partition)]
        rebuild = self._rebuilds.get(partition)
        if rebuild is None:
            for request in told:
                self._limits.restate(request, now, partition=partition)
            return
        rebuild.heard.add((restate.owner_role, restate.owner_slot, restate.owner_epoch))
        rebuild.restated += [(now, request) for request in told]

    def keep(self, usage: Usage, partition: int) -> bool:
        """Whether the row waits for the others: it is put into the limits when the partition opens."""
        rebuild = self._rebuilds.get(partition)
        if rebuild is None:
            return False
        rebuild.usages.append(usage)
        return True

    def usage_is_read(self, partition: int) -> None:
        """The rows that were there at the takeover have been given to `keep`."""
        rebuild = self._rebuilds.get(partition)
        if rebuild is not None:
            rebuild.usage_is_read = True

    def open_due(self, fleet: FleetView, now: int) -> list[Opened]:
        """Opens what has waited long enough, or for nobody."""
        if not self._rebuilds:
            return []
        gateways = {(GATEWAY, member.slot, member.epoch) for member in fleet.live(GATEWAY)}
        coordinated = {
            shard
            for member in fleet.live(LEDGER)
            if member.heartbeat is not None
            for shard in member.heartbeat.coordinator_shards
        }
        announced = {
            (status.partition, status.takeover_offset)
            for member in fleet.live("admission")
            if member.heartbeat is not None
            for status in member.heartbeat.partitions
        }
        opened = []
        for partition, rebuild in list(self._rebuilds.items()):
            if rebuild.announced_at is None and (partition, rebuild.takeover_offset) in announced:
                rebuild.announced_at = now
            is_read = rebuild.usage_is_read or now - rebuild.since >= USAGE_WAIT_MS
            # A process that has just begun to listen would take owners that it did not hear yet for none.
            answered = fleet.may_judge and fleet.heard_all and gateways <= rebuild.heard
            shard = topics.shard_of(partition)
            if topics.priority_of(partition) is PriorityClass.BATCH and shard in coordinated:
                answered = answered and any(owner[:2] == (LEDGER, shard) for owner in rebuild.heard)
            if is_read and (answered or self._waited(rebuild, now)):
                del self._rebuilds[partition]
                self._fill(rebuild, partition, now)
                owners, told, rows = len(rebuild.heard), len(rebuild.restated), len(rebuild.usages)
                opened.append(Opened(partition, now - rebuild.since, owners, told, rows))
        return opened

    def _waited(self, rebuild: _Rebuild, now: int) -> bool:
        if rebuild.announced_at is None:
            return now - rebuild.since >= _ANNOUNCE_WAITS * self.restate_wait_ms
        return now - rebuild.announced_at >= self.restate_wait_ms

    def _fill(self, rebuild: _Rebuild, partition: int, now: int) -> None:
        ended: dict[bytes, Usage] = {}
        for usage in rebuild.usages:
            known = ended.get(usage.request_id)
            if known is None or usage_rank(usage) > usage_rank(known):
                ended[usage.request_id] = usage
        events: list[tuple[int, int, Usage | RestatedRequest]] = []
        for told_at, request in rebuild.restated:
            row = ended.get(request.request_id)
            # The row of this attempt is newer than the word that it runs; one of an earlier attempt is older.
            if row is None or row.attempt < request.attempt:
                ended.pop(request.request_id, None)
                events.append((told_at - request.age_ms, told_at, request))
        events += [(usage.accepted_at, now, usage) for usage in ended.values()]
        for accepted_at, told_at, event in sorted(events, key=lambda entry: entry[0]):
            if isinstance(event, Usage):
                settle_usage(self._limits, event, accepted_at, now, partition)
            else:
                self._limits.restate(event, told_at, partition=partition)


def settle_usage(limits: Limits, usage: Usage, used_at: int, now: int, partition: int | None) -> None:
    """Puts a usage row into the limits. `used_at`: when, if the request is not known."""
    limits.settle(
        usage.request_id,
        usage.tenant,
        usage.priority,
        usage.input_tokens,
        usage.output_tokens,
        used_at,
        now,
        partition=partition,
    )
