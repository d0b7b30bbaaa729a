"""Who a stream service is in the fleet, and when it has to go."""

from typing import Any, NamedTuple

import pytest

from schemas import topics
from schemas.codec import decode, encode
from schemas.fleet import FleetView
from schemas.records import Heartbeat, Join, Left, PartitionStatus
from streams.membership import Membership, SupersededError
from tests.log_consumer import LogRecord

EPOCH = 7


class Acked(NamedTuple):
    offset: int


class Events:
    """fleet.events, where the next record lies at EPOCH."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send_and_wait(
        self, topic: str, value: bytes | None = None, key: bytes | None = None, partition: int | None = None
    ) -> Acked:
        assert (topic, partition) == (topics.EVENTS, 0)
        self.sent.append(decode(value or b""))
        return Acked(EPOCH + len(self.sent) - 1)


def batch(*values: Any, offset: int = 0) -> list[LogRecord]:
    return [LogRecord("t", 0, offset + i, None, encode(value)) for i, value in enumerate(values)]


async def joined(**hooks: Any) -> Membership:
    membership = Membership("admission", 2, FleetView(), **hooks)
    await membership.join(Events(), "http://127.0.0.1:1")
    return membership


async def test_its_epoch_is_the_offset_of_its_join_and_its_heartbeats_say_so() -> None:
    events = Events()
    membership = Membership("admission", 2, FleetView())
    with pytest.raises(RuntimeError, match="has not joined"):
        membership.heartbeat()
    await membership.join(events, "http://127.0.0.1:1")
    status = PartitionStatus(0, 1, 2, [])
    heartbeat = membership.heartbeat([status])
    assert (heartbeat.role, heartbeat.slot, heartbeat.epoch) == ("admission", 2, EPOCH)
    assert (heartbeat.address, heartbeat.partitions) == ("http://127.0.0.1:1", [status])
    await membership.leave(events)
    assert events.sent == [
        Join("admission", 2, heartbeat.nonce, "http://127.0.0.1:1"),
        Left("admission", 2, EPOCH, "stopped"),
    ]


async def test_it_tells_itself_from_its_peers() -> None:
    peers: list[Heartbeat] = []
    changes: list[None] = []
    membership = await joined(on_peer=peers.append, on_change=lambda: changes.append(None))
    earlier_life = Heartbeat("admission", 2, EPOCH - 1, b"")
    peer = Heartbeat("admission", 1, EPOCH + 1, b"")
    membership.on_heartbeats(batch(earlier_life, peer, Heartbeat("worker", 2, EPOCH + 2, b"")))
    assert (membership.heard_itself, peers, len(changes)) == (False, [earlier_life, peer], 1)
    membership.on_heartbeats(batch(membership.heartbeat()))
    assert (membership.heard_itself, len(peers), len(changes)) == (True, 2, 2)
    assert membership.view.epoch_of("worker", 2) == EPOCH + 2


async def test_a_younger_life_in_its_slot_ends_it() -> None:
    changes: list[None] = []
    membership = await joined(on_change=lambda: changes.append(None))
    membership.on_events(batch(Join("admission", 1, b""), Join("worker", 2, b""), offset=EPOCH + 1))
    assert len(changes) == 1
    with pytest.raises(SupersededError, match=f"epoch {EPOCH + 3} has slot 2, this process is {EPOCH}"):
        membership.on_events(batch(Join("admission", 2, b""), offset=EPOCH + 3))
    by_heartbeat = await joined()
    with pytest.raises(SupersededError):
        by_heartbeat.on_heartbeats(batch(Heartbeat("admission", 2, EPOCH + 1, b"")))
    assert len(changes) == 1
