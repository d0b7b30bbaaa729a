"""Two administrators at a time: which of their records of control.tenants count, for whoever reads them."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from schemas.control_log import NOTHING, ControlLog, replaces_header


@dataclass
class Topic:
    """(name, value, headers) by offset; `compacted` leaves the last of each name."""

    records: list[tuple[str, str | None, list[tuple[str, bytes]]]] = field(default_factory=list)

    def put(self, name: str, value: str | None, replaces: int | None = None) -> int:
        headers = [] if replaces is None else [replaces_header(replaces)]
        self.records.append((name, value, headers))
        return len(self.records) - 1

    def read(self, compacted: bool = False) -> dict[str, str | None]:
        """What a process that begins now holds for true."""
        log, found = ControlLog(), dict[str, str | None]()
        last = {name: offset for offset, (name, *_) in enumerate(self.records)}
        for offset, (name, value, headers) in enumerate(self.records):
            if compacted and last[name] != offset:
                continue
            if log.counts(name, offset, headers, value is None):
                found[name] = value
        return {name: value for name, value in found.items() if value is not None}


def test_of_two_changes_to_the_same_record_the_first_counts() -> None:
    topic = Topic()
    first = topic.put("acme", "a", NOTHING)
    topic.put("acme", "b", first)
    topic.put("acme", "c", first)
    assert topic.read() == {"acme": "b"}


def test_of_two_that_make_the_same_tenant_the_first_counts() -> None:
    topic = Topic()
    topic.put("acme", "a", NOTHING)
    topic.put("acme", "b", NOTHING)
    assert topic.read() == {"acme": "a"}


def test_a_change_does_not_bring_back_what_was_deleted_meanwhile_but_making_it_anew_does() -> None:
    topic = Topic()
    first = topic.put("acme", "a")
    topic.put("acme", None, first)
    topic.put("acme", "b", first)
    assert topic.read() == {}
    topic.put("acme", "c", NOTHING)
    assert topic.read() == {"acme": "c"}


def test_one_that_names_none_replaces_whatever_is_there() -> None:
    topic = Topic()
    topic.put("acme", "a", NOTHING)
    topic.put("acme", "b")
    topic.put("other", "c")
    assert topic.read() == {"acme": "b", "other": "c"}


def test_the_first_of_a_name_counts_for_what_it_replaced_may_be_compacted_away() -> None:
    topic = Topic()
    topic.put("acme", "b", topic.put("acme", "a", NOTHING))
    assert topic.read(compacted=True) == {"acme": "b"}


# (who writes, does it read before): a writer that did not read writes on what it last read.
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20))
def test_what_is_in_force_is_the_same_after_compaction_and_no_change_is_lost_in_silence(
    steps: list[tuple[int, bool]],
) -> None:
    topic, logs, read_to = Topic(), [ControlLog() for _ in range(3)], [0, 0, 0]
    counted: list[list[int]] = [[], [], []]

    def read(who: int) -> None:
        for offset in range(read_to[who], len(topic.records)):
            name, value, headers = topic.records[offset]
            if logs[who].counts(name, offset, headers, value is None):
                counted[who].append(offset)
        read_to[who] = len(topic.records)

    told = []
    for n, (who, reads) in enumerate(steps):
        if reads:
            read(who)
        offset = topic.put("acme", str(n), logs[who].version("acme"))
        read(who)
        if offset in counted[who]:
            told.append(str(n))  # its writer is told that it holds, and so it did
        while offset not in counted[who]:
            kept = topic.records[counted[who][-1]][1]
            offset = topic.put("acme", kept, logs[who].version("acme"))
            read(who)
    assert topic.read() == topic.read(compacted=True) == ({"acme": told[-1]} if told else {})
