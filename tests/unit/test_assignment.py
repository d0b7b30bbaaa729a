"""How a group's partitions are spread over its members."""

from typing import Any
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from streams.assignment import SpreadAssignor, spread

TOPIC = "inference.requests"


def members(count: int) -> list[str]:
    return [f"admission-{slot}" for slot in range(count)]


def owners(partitions: int, names: list[str]) -> dict[int, str]:
    return {number: name for name, mine in spread(range(partitions), names).items() for number in mine}


@given(st.integers(0, 200), st.integers(1, 30))
def test_each_partition_has_one_owner_and_none_has_more_than_one_above_another(
    partitions: int, count: int
) -> None:
    given_out = spread(range(partitions), members(count))
    assert sorted(number for mine in given_out.values() for number in mine) == list(range(partitions))
    counts = [len(mine) for mine in given_out.values()]
    assert max(counts) - min(counts) <= 1


@given(st.integers(0, 100), st.permutations(members(6)))
def test_the_order_in_which_members_are_named_does_not_matter(partitions: int, names: list[str]) -> None:
    assert owners(partitions, names) == owners(partitions, members(6))


def test_few_partitions_move_when_a_member_goes() -> None:
    names = members(8)
    before = owners(192, names)
    for gone in names:
        after = owners(192, [name for name in names if name != gone])
        moved = [number for number in before if before[number] != after[number]]
        assert {number for number in before if before[number] == gone} <= set(moved)
        # 24 were its own. Dealt out in turn, 168 would move.
        assert len(moved) <= 24 + 16


class Cluster:
    def partitions_for_topic(self, topic: str) -> set[int] | None:
        return set(range(12)) if topic == TOPIC else None


def assigned(*names: str) -> dict[str, list[int]]:
    joined: dict[str, Any] = {f"{name}-{uuid4()}": SpreadAssignor.metadata([TOPIC]) for name in names}
    found = SpreadAssignor.assign(Cluster(), joined)
    return {
        member_id[:-37]: [n for topic, mine in got.assignment for n in mine if topic == TOPIC]
        for member_id, got in found.items()
    }


def test_a_member_is_known_by_its_name_in_each_of_its_lives() -> None:
    assert assigned(*members(5)) == assigned(*members(5)) == spread(range(12), members(5))


def test_members_of_one_name_share_too() -> None:
    joined: dict[str, Any] = {f"admission-0-{uuid4()}": SpreadAssignor.metadata([TOPIC]) for _ in range(3)}
    found = SpreadAssignor.assign(Cluster(), joined)
    assert [len(mine) for got in found.values() for _, mine in got.assignment] == [4, 4, 4]
