"""Which member of a consumer group gets which partition: evenly, and few move when a member comes or goes.

Dealt out in turn, as by Kafka's `roundrobin`, most partitions change hands with each process that dies, and
with each that comes back. Here every partition ranks the members by a hash of both (rendezvous hashing:
Thaler and Ravishankar, "A name-based mapping scheme for rendezvous", 1996) and goes to the first that has not
its share yet (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2016). What a
member says of itself never changes, so a static one that restarts finds its partitions without a rebalance.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

# A member id is the group instance id, or the client id, "-" and a UUID of this life.
_UUID_CHARS = 36


def spread(partitions: Iterable[int], members: Iterable[str]) -> dict[str, list[int]]:
    """By member its partitions, sorted. Every member has as many as any other, or one less."""
    numbers = sorted(partitions)
    given: dict[str, list[int]] = {member: [] for member in members}
    share, num_larger = divmod(len(numbers), len(given))
    for number in numbers:
        for member in sorted(given, key=lambda member: _rank(number, member)):
            mine = given[member]
            if len(mine) < share or (len(mine) == share and num_larger):
                num_larger -= len(mine) == share
                mine.append(number)
                break
    return given


def _rank(partition: int, member: str) -> bytes:
    return blake2b(f"{partition} {member}".encode(), digest_size=8).digest()


class SpreadAssignor(AbstractPartitionAssignor):  # type: ignore[misc]  # aiokafka tells no types
    """For groups of one topic, whose members all read it."""

    name = "spread"

    @classmethod
    def assign(
        cls, cluster: Any, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        # By the name that a static member keeps over its lives.
        names = {member_id[: -_UUID_CHARS - 1]: member_id for member_id in sorted(members)}
        if len(names) < len(members):
            names = {member_id: member_id for member_id in members}
        found: dict[str, list[tuple[str, list[int]]]] = {member_id: [] for member_id in members}
        for topic in {topic for metadata in members.values() for topic in metadata.subscription}:
            for name, numbers in spread(cluster.partitions_for_topic(topic) or (), names).items():
                found[names[name]].append((topic, numbers))
        return {m: ConsumerProtocolMemberAssignment(0, found[m], b"") for m in members}

    @classmethod
    def metadata(cls, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        return ConsumerProtocolMemberMetadata(0, list(topics), b"")

    @classmethod
    def on_assignment(cls, assignment: ConsumerProtocolMemberAssignment) -> None:
        pass
