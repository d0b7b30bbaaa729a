"""Requests are decided about by class, and no class stands."""

import asyncio
from dataclasses import dataclass

from schemas.priority import PriorityClass
from schemas.topics import partition, priority_of
from streams.admission.inbox import FLOOR, MOST, MOST_BELOW, Inbox


@dataclass(frozen=True)
class Message:
    partition: int
    offset: int


def message(priority: PriorityClass, offset: int, shard: int = 0) -> Message:
    return Message(partition(shard, priority), offset)


async def test_an_interactive_request_does_not_wait_for_a_burst_of_batch() -> None:
    inbox = Inbox()
    for offset in range(500):
        await inbox.put(message(PriorityClass.BATCH, offset))
    await inbox.put(message(PriorityClass.INTERACTIVE, 0))
    assert message(PriorityClass.INTERACTIVE, 0) in [*await inbox.take(), *await inbox.take()]


async def test_nor_where_the_consumer_hands_over_one_in_a_few_turns_of_the_loop() -> None:
    inbox = Inbox()

    async def hand_over() -> None:
        for offset in range(200):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await inbox.put(message(PriorityClass.BATCH, offset))
        await inbox.put(message(PriorityClass.INTERACTIVE, 0))

    handing = asyncio.create_task(hand_over())
    taken = 0
    while message(PriorityClass.INTERACTIVE, 0) not in (some := await inbox.take()):
        taken += len(some)
    await handing
    assert taken <= FLOOR


async def test_each_partition_keeps_its_order() -> None:
    inbox = Inbox()
    for offset in range(40):
        for priority in reversed(PriorityClass):
            for shard in (0, 1):
                await inbox.put(message(priority, offset, shard))
    taken: list[Message] = []
    while len(taken) < 40 * 3 * 2:
        some = await inbox.take()
        assert len({priority_of(each.partition) for each in some}) == 1
        taken += some
    for shard in (0, 1):
        for priority in PriorityClass:
            number = partition(shard, priority)
            assert [each.offset for each in taken if each.partition == number] == list(range(40))


async def test_the_lowest_class_has_its_turn_while_higher_ones_keep_coming() -> None:
    inbox = Inbox()
    for offset in range(4):
        await inbox.put(message(PriorityClass.BATCH, offset))
    taken = []
    for offset in range(4 * FLOOR):
        await inbox.put(message(PriorityClass.INTERACTIVE, offset))
        taken += await inbox.take()
    assert sum(each.partition == partition(0, PriorityClass.BATCH) for each in taken) == 4


async def test_who_puts_waits_while_it_is_full() -> None:
    inbox = Inbox(capacity=2)
    await inbox.put(message(PriorityClass.BATCH, 0))
    await inbox.put(message(PriorityClass.BATCH, 1))
    third = asyncio.create_task(inbox.put(message(PriorityClass.BATCH, 2)))
    await asyncio.sleep(0)
    assert not third.done()
    assert [each.offset for each in [*await inbox.take(), *await inbox.take()]] == [0, 1, 2]
    await third


async def test_who_takes_waits_for_what_comes() -> None:
    inbox = Inbox()
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0.01)
    assert not taking.done()
    await inbox.put(message(PriorityClass.FREE, 7))
    assert await taking == [message(PriorityClass.FREE, 7)]


async def test_few_are_taken_together_where_one_of_a_higher_class_may_come() -> None:
    inbox = Inbox()
    for offset in range(MOST + 1):
        for priority in (PriorityClass.INTERACTIVE, PriorityClass.BATCH):
            await inbox.put(message(priority, offset))
    sizes: list[tuple[int, int]] = []
    while len(sizes) < 4:
        some = await inbox.take()
        sizes.append((priority_of(some[0].partition), len(some)))
    # The highest class, then what the lowest is owed, and when that is all there is, a few of it.
    assert sizes == [(0, FLOOR - 1), (2, 1), (0, MOST - FLOOR + 2), (2, MOST_BELOW)]
