"""Clients that share a reading of a partition: who joins where, and how two readings become one."""

import asyncio

import pytest
from aiokafka import ConsumerRecord
from hypothesis import given
from hypothesis import strategies as st

from gateway.partition_scan import FOLLOW_S, PartitionScan, joinable
from gateway.reader import StreamReader
from gateway.replay import Replay, ReplayReader
from schemas.api.errors import ApiError
from schemas.codec import decode, encode
from schemas.records import Claim, Completion, Tokens
from schemas.token_records import TokenChunk
from tests.gateway_factories import EPOCH, MODEL, WORKER_EPOCH, config

TEXT = b"abcdefgh"
RIDS = [bytes([n]) * 16 for n in range(3)]


def replay(rid: bytes = RIDS[0]) -> Replay:
    return Replay(rid, "acme", ReplayReader(config(), MODEL, False, -1, 0.0))


def message(offset: int, record: object) -> ConsumerRecord:
    return ConsumerRecord(
        "inference.tokens", 3, offset, 1_000 + offset, 0, None, encode(record), 0, -1, -1, []
    )


def log() -> list[ConsumerRecord]:
    """Each record is a step in which all three requests get a token; offsets 100 to 107, then the ends."""
    messages = [
        message(
            100 + at,
            Tokens.of(0, WORKER_EPOCH, [TokenChunk(r, 1, at, [TEXT[at]], None) for r in RIDS]),
        )
        for at in range(len(TEXT))
    ]
    ends = [Completion(r, 1, 0, WORKER_EPOCH, 1, 0, len(TEXT), "length") for r in RIDS]
    return messages + [message(108 + n, end) for n, end in enumerate(ends)]


def join(scan: PartitionScan, position: int, target: Replay) -> None:
    target.fold.position = position
    scan.join(target.fold)


async def read(record: ConsumerRecord) -> object:
    return decode(record.value or b"")


def text(of: Replay) -> str:
    assert isinstance(of.reader, StreamReader)
    return "".join(text for text, _ in of.reader.take())


async def test_who_waits_is_read_for_from_the_first_of_their_offsets() -> None:
    scan = PartitionScan(3)
    replays = [replay(), replay(), replay(RIDS[1])]
    for offset, target in zip((104, 100, 102), replays, strict=True):
        assert scan.may_join(offset)
        join(scan, offset, target)
    assert scan.wanted
    assert scan.begin(50, 111) == 100
    await scan.give(log(), read, [scan])
    assert [text(target) for target in replays] == ["abcdefgh"] * 3
    assert all(target.done for target in replays)
    scan.tick(1.0, None)
    assert not scan.wanted


async def test_only_what_was_not_given_yet_can_be_joined() -> None:
    scan = PartitionScan(3)
    join(scan, 100, replay())
    scan.begin(0, 200)
    await scan.give(log()[:4], read, [scan])
    assert not scan.may_join(103)
    assert scan.may_join(104)


@pytest.mark.parametrize("offset", [49, 201])
def test_what_the_log_does_not_hold_is_gone(offset: int) -> None:
    scan = PartitionScan(3)
    old, kept = replay(), replay()
    join(scan, offset, old)
    join(scan, 50, kept)
    assert scan.begin(50, 200) == 50
    assert isinstance(old.reader.end, ApiError)
    assert old.reader.end.status == 410
    assert kept.reader.end is None
    alone = PartitionScan(3)
    join(alone, offset, replay())
    assert alone.begin(50, 200) is None
    assert not alone.wanted


async def test_a_scan_that_catches_up_gives_its_clients_to_the_one_ahead() -> None:
    records = log()
    ahead, behind = PartitionScan(3), PartitionScan(3)
    first, late = replay(RIDS[0]), replay(RIDS[0])
    join(ahead, 100, first)
    ahead.begin(0, 200)
    await ahead.give(records[:5], read, [ahead])
    join(behind, 100, late)
    behind.begin(0, 200)
    scans = [ahead, behind]
    await behind.give(records[:3], read, scans)
    assert [scan.wanted for scan in scans] == [True, True]
    await behind.give(records[3:], read, scans)  # not beyond the place where the other stands
    assert [scan.wanted for scan in scans] == [True, False]
    assert text(late) == "abcde"
    await ahead.give(records[5:], read, scans)
    assert (text(first), text(late)) == ("abcdefgh", "fgh")
    assert first.done
    assert late.done


async def test_two_scans_that_stand_at_the_end_become_one() -> None:
    records = log()[:4]
    scans = [PartitionScan(3), PartitionScan(3)]
    for scan in scans:
        join(scan, 100, replay())
        scan.begin(0, 200)
        await scan.give(records, read, scans)
    assert [scan.wanted for scan in scans] == [True, False]


@given(st.data())
def test_however_scans_run_and_meet_each_client_gets_all_once(data: st.DataObject) -> None:
    asyncio.run(_run_scans(data))


async def _run_scans(data: st.DataObject) -> None:
    records = log()
    end = 100 + len(records)
    scans: list[PartitionScan] = []
    told: dict[Replay, str] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["come", "begin", "read", "read", "read"]))
        if action == "come":
            first_offset = data.draw(st.integers(50, 100))
            # As its gateway would: never behind its first record, and at times well before it.
            target = replay(data.draw(st.sampled_from(RIDS)))
            told[target] = ""
            scan = joinable(scans, 3, first_offset)
            if scan is None:
                scan = PartitionScan(3)
                scans.append(scan)
            join(scan, first_offset, target)
        elif scans:
            scan = data.draw(st.sampled_from(scans))
            if scan.position is None:
                scan.begin(50, end)
            elif action == "read":
                at = max(0, scan.position - 100)
                await scan.give(records[at : at + data.draw(st.integers(1, 6))], read, scans)
        scans = [scan for scan in scans if scan.wanted]
        for target in told:
            told[target] += text(target)
    for now in range(1, 100):
        for scan in scans:
            if scan.position is None:
                scan.begin(50, end)
            assert scan.position is not None
            await scan.give(records[max(0, scan.position - 100) :], read, scans)
            scan.tick(float(now), None)
        scans = [scan for scan in scans if scan.wanted]
    assert not scans
    for target in told:
        assert told[target] + text(target) == "abcdefgh"
        assert isinstance(target.reader.end, Completion)


async def test_a_client_that_leaves_is_given_nothing_more() -> None:
    scan = PartitionScan(3)
    stays, leaves, never = replay(), replay(), replay()
    for target in (stays, leaves, never):
        join(scan, 100, target)
    scan.drop(never.fold)
    scan.begin(0, 200)
    scan.drop(leaves.fold)
    await scan.give(log(), read, [scan])
    assert (text(stays), text(leaves), text(never)) == ("abcdefgh", "", "")


async def test_a_claim_of_all_is_every_replays_news() -> None:
    scan = PartitionScan(3)
    replays = [replay(rid) for rid in RIDS]
    for target in replays:
        target.state.owner_epoch = EPOCH
        join(scan, 100, target)
    scan.begin(0, 200)
    await scan.give([message(100, Claim(EPOCH, 2, 99))], read, [scan])
    assert [target.state.owner_epoch for target in replays] == [99] * 3


async def test_the_end_of_a_scan_is_told_to_all_that_wait() -> None:
    running, starting = PartitionScan(3), PartitionScan(3)
    replays = [replay(), replay()]
    join(running, 100, replays[0])
    running.begin(0, 200)
    join(starting, 100, replays[1])
    for scan in (running, starting):
        scan.end_all(ApiError(503, "broker_unavailable", "no"))
        assert not scan.wanted
    assert all(isinstance(target.reader.end, ApiError) for target in replays)


async def test_a_stream_that_nobody_reads_is_followed_for_a_while_and_goes_on_where_it_was() -> None:
    records = log()
    scan, target = PartitionScan(3), replay()
    fold = target.fold
    join(scan, 100, target)
    scan.begin(0, 200)
    await scan.give(records[:3], read, [scan])
    fold.views.remove(target)
    fold.kept, fold.used_at = True, 1_000.0
    scan.tick(1_000.0 + FOLLOW_S - 1, None)
    assert (scan.wanted, scan.read) == (True, False)
    await scan.give(records[3:5], read, [scan])
    scan.tick(1_000.0 + FOLLOW_S, None)
    assert (scan.wanted, fold.fed, fold.position) == (False, False, 105)
    # Who comes then costs what lies behind that.
    late, again = PartitionScan(3), replay()
    again.attach(fold, 0.0)
    late.join(fold)
    assert late.begin(0, 200) == 105
    await late.give(records[5:], read, [late])
    assert text(again) == "abcdefgh"
    assert isinstance(again.reader.end, Completion)


async def test_a_stream_that_is_not_kept_is_not_followed() -> None:
    scan, target = PartitionScan(3), replay()
    join(scan, 100, target)
    scan.begin(0, 200)
    target.fold.views.remove(target)
    scan.tick(1.0, None)
    assert not scan.wanted


async def test_only_records_that_may_concern_a_stream_are_decoded() -> None:
    decoded: list[int] = []

    async def noting(record: ConsumerRecord) -> object:
        decoded.append(record.offset)
        return await read(record)

    others = [TokenChunk(bytes([n]) * 16, 1, 0, [97], None) for n in range(10, 20)]
    strange = ConsumerRecord("inference.tokens", 3, 105, 1, 0, None, b"\xc3\x01" + bytes(60), 0, -1, -1, [])
    records = [
        message(100, Tokens.of(0, WORKER_EPOCH, others)),
        message(101, Tokens.of(0, WORKER_EPOCH, [*others, TokenChunk(RIDS[0], 1, 0, [97], None)])),
        message(102, Completion(RIDS[1], 1, 0, WORKER_EPOCH, 1, 0, 0, "length")),
        message(103, Claim(EPOCH, 2, 99)),
        message(104, Completion(RIDS[0], 1, 0, WORKER_EPOCH, 1, 0, 1, "length")),
    ]
    scan, target = PartitionScan(3), replay()
    join(scan, 100, target)
    scan.begin(0, 200)
    await scan.give(records, noting, [scan])
    assert decoded == [101, 103, 104]
    assert scan.position == 105
    assert text(target) == "a"
    assert target.done
    with pytest.raises(ValueError, match="unknown schema"):  # a schema may be on its way: decoding waits
        await scan.give([strange], noting, [scan])


async def test_a_lasting_scan_takes_over_at_its_place_and_is_joined_nowhere_else() -> None:
    own, scan, target = PartitionScan(3, 104), PartitionScan(3), replay()
    assert [own.may_join(offset) for offset in (103, 104, 105)] == [False, True, False]
    records = log()
    join(scan, 100, target)
    scan.begin(0, 200)
    await scan.give(records, read, [scan, own])
    assert (text(target), scan.wanted, own.wanted) == ("abcd", False, True)
    for record in records[4:]:
        own.on_record(await read(record), record.offset, record.timestamp, 0.0)
    assert text(target) == "efgh"
    assert target.done
