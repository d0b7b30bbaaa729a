"""Requests are decided about by class, and no class stands."""

import asyncio
from dataclasses import dataclass

from schemas.priority import PriorityClass
from schemas.topics import partition
from streams.admission.inbox import FLOOR, Inbox


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
    first_two = [await inbox.take(), await inbox.take()]
    assert message(PriorityClass.INTERACTIVE, 0) in first_two


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
    while (await inbox.take()).partition != partition(0, PriorityClass.INTERACTIVE):
        taken += 1
    await handing
    assert taken <= FLOOR


async def test_each_partition_keeps_its_order() -> None:
    inbox = Inbox()
    for offset in range(40):
        for priority in reversed(PriorityClass):
            for shard in (0, 1):
                await inbox.put(message(priority, offset, shard))
    taken = [await inbox.take() for _ in range(40 * 3 * 2)]
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
        taken.append(await inbox.take())
    assert sum(each.partition == partition(0, PriorityClass.BATCH) for each in taken) == 4


async def test_who_puts_waits_while_it_is_full() -> None:
    inbox = Inbox(capacity=2)
    await inbox.put(message(PriorityClass.BATCH, 0))
    await inbox.put(message(PriorityClass.BATCH, 1))
    third = asyncio.create_task(inbox.put(message(PriorityClass.BATCH, 2)))
    await asyncio.sleep(0)
    assert not third.done()
    assert [(await inbox.take()).offset for _ in range(3)] == [0, 1, 2]
    await third


async def test_who_takes_waits_for_what_comes() -> None:
    inbox = Inbox()
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0.01)
    assert not taking.done()
    await inbox.put(message(PriorityClass.FREE, 7))
    assert (await taking).offset == 7
