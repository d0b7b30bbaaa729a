"""KV from pool to pool with real bytes: layouts, content checks, the writer's threads and its last words."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.kv_layout import KVLayout
from schemas.records import ContentCheck
from tests.handoff_pools import TRANSFER, Side, layout, some_blocks, token_kv
from workers.handoff.content import samples
from workers.handoff.kv_pool import KVPool, compare
from workers.handoff.layout import RankPool, refusal
from workers.handoff.memory_transport import Fault, MemoryNetwork
from workers.handoff.transport import Copy, TransferError
from workers.handoff.write_lane import WriteEvents, WriteLimits
from workers.handoff.writer import Writer

NUM_BLOCKS = 24
LIMITS = WriteLimits(max_call_bytes=4096, max_call_copies=8, settle_s=0.05)


class Words:
    """What writers say, in the order that they say it."""

    def __init__(self) -> None:
        self.said: Queue[tuple[str, object]] = Queue()
        self.events = WriteEvents(
            lambda transfer_id, checks: self.said.put(("written", checks)),
            lambda transfer_id, error: self.said.put(("failed", error)),
            lambda transfer_id, may_land: self.said.put(("closed", may_land)),
        )

    def next(self) -> tuple[str, object]:
        return self.said.get(timeout=20)


@contextmanager
def writers(side: Side, words: Words, limits: WriteLimits = LIMITS) -> Iterator[list[Writer]]:
    opened = [
        Writer(pool, transport, words.events, limits)
        for pool, transport in zip(side.pools, side.transports, strict=True)
    ]
    try:
        yield opened
    finally:
        for writer in opened:
            writer.close()


def pair(source: KVLayout, target: KVLayout, network: MemoryNetwork | None = None) -> tuple[Side, Side]:
    network = network or MemoryNetwork()
    return (
        Side.open(source, NUM_BLOCKS, lambda rank: network.join(f"prefill-{rank}")),
        Side.open(target, NUM_BLOCKS, lambda rank: network.join(f"decode-{rank}")),
    )


def hand_over(
    source: Side, target: Side, num_tokens: int, cached_blocks: int, random: Random
) -> tuple[list[int], list[ContentCheck], int]:
    """All of a sequence, chunk by chunk and layer by layer; returns decode's blocks, the checks, and how many
    tokens decode had."""
    first = min(
        cached_blocks * target.layout.block_size,
        (num_tokens - 1) // target.layout.block_size * (target.layout.block_size),
    )
    ours = some_blocks(random, num_tokens, source.layout.block_size, NUM_BLOCKS)
    theirs = some_blocks(random, num_tokens - first, target.layout.block_size, NUM_BLOCKS)
    source.fill(ours, token_kv(source.layout, num_tokens, 7))
    reserved, words, checks = target.reserved(theirs, first), Words(), list[ContentCheck]()
    with writers(source, words) as opened:
        for writer in opened:
            writer.start(reserved, ours, num_tokens, float("inf"))
        for start in range(0, num_tokens, 13):
            for layer in range(source.layout.num_layers):
                for writer in opened:
                    chunk = range(start, min(start + 13, num_tokens))
                    writer.computed(TRANSFER, chunk, range(layer, layer + 1))
        for writer in opened:
            writer.complete(TRANSFER)
        for _ in opened:
            word, told = words.next()
            assert word == "written"
            assert isinstance(told, list)
            checks += told
        assert [writer.num_open for writer in opened] == [0] * len(opened)
    return theirs, checks, first


@given(
    st.sampled_from([4, 8, 16]),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 60),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_bytes_arrive_whatever_block_sizes_and_ranks_the_sides_have(
    source_size: int,
    target_size: int,
    source_ranks: int,
    target_ranks: int,
    num_tokens: int,
    cached_blocks: int,
    seed: int,
) -> None:
    source, target = pair(layout(source_size, source_ranks), layout(target_size, target_ranks))
    assert refusal(source.layout, target.layout) == ""
    blocks, checks, first = hand_over(source, target, num_tokens, cached_blocks, Random(seed))
    assert target.holds(blocks, token_kv(target.layout, num_tokens, 7), first)
    assert target.untouched(blocks)
    for pool, place in zip(target.pools, target.places(blocks, first), strict=True):
        assert compare(pool, place, num_tokens, checks) == ""


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.FLIPPED])
def test_a_copy_that_is_lost_or_wrong_where_a_check_looks_is_found(fault: Fault) -> None:
    network = MemoryNetwork()
    source, target = pair(layout(), layout(), network)
    num_copies = 0

    def count(copy: Copy) -> Fault:
        nonlocal num_copies
        num_copies += 1
        return Fault.NONE

    network.fault = count
    blocks, checks, _ = hand_over(source, target, 40, 0, Random(3))
    [pool], [place] = target.pools, target.places(blocks, 0)
    assert compare(pool, place, 40, checks) == ""
    found = 0
    for bad in range(num_copies):
        seen = iter(range(num_copies))
        network.fault = lambda copy, bad=bad, seen=seen: fault if next(seen) == bad else Fault.NONE  # type: ignore[misc]
        pool.keys[:], pool.values[:] = 0xEE, 0xDD
        blocks, checks, _ = hand_over(source, target, 40, 0, Random(3))
        right = target.holds(blocks, token_kv(target.layout, 40, 7))
        error = compare(pool, place, 40, checks)
        assert not (right and error), "a false alarm"
        found += bool(error)
    # A sample: of three blocks in three layers, keys and values, six of eighteen are looked at.
    assert found >= num_copies // 4


def test_a_block_that_was_never_written_is_always_found() -> None:
    source, target = pair(layout(), layout())
    blocks, checks, _ = hand_over(source, target, 40, 0, Random(3))
    [pool], [place] = target.pools, target.places(blocks, 0)
    for block in blocks:
        keys, values = pool.keys[:, block].copy(), pool.values[:, block].copy()
        pool.keys[:, block], pool.values[:, block] = 0xEE, 0xDD
        assert compare(pool, place, 40, checks).startswith("content: ")
        pool.keys[:, block], pool.values[:, block] = keys, values
    for layer in range(3):
        keys = pool.keys[layer].copy()
        pool.keys[layer] = 0xEE
        assert compare(pool, place, 40, checks).startswith(f"content: keys of layer {layer}")
        pool.keys[layer] = keys


def test_missing_checks_are_no_agreement() -> None:
    source, target = pair(layout(tp_degree=4), layout(tp_degree=2))
    blocks, checks, _ = hand_over(source, target, 40, 0, Random(3))
    for pool, place in zip(target.pools, target.places(blocks, 0), strict=True):
        assert compare(pool, place, 40, checks) == ""
        of_one_rank = [check for check in checks if check.first_head % 2 == 0]
        assert compare(pool, place, 40, of_one_rank).endswith("is not checked for all heads")
        assert "not reserved" in compare(pool, place, 40, [replace(check, block=9) for check in checks])


@given(st.integers(1, 200), st.integers(1, 80))
def test_samples_touch_every_block_and_every_layer(num_blocks: int, num_layers: int) -> None:
    taken = list(samples(num_blocks, num_layers))
    assert {sample.block for sample in taken} == set(range(num_blocks))
    assert {(sample.layer, sample.values) for sample in taken} == {
        (layer, values) for layer in range(num_layers) for values in (False, True)
    }
    every = list(samples(num_blocks, num_layers, all_of_it=True))
    assert len(set(every)) == len(every) == num_blocks * num_layers * 2
    assert set(taken) <= set(every)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dtype": "float32"}, "dtype bfloat16 cannot become float32"),
        ({"arithmetic": "deterministic"}, "arithmetic fast cannot become deterministic"),
        ({"num_layers": 4}, "num_layers 3 cannot become 4"),
        ({"num_kv_heads": 8}, "num_kv_heads 4 cannot become 8"),
        ({"head_dim": 16}, "head_dim 8 cannot become 16"),
        ({"tp_degree": 3}, "tp_degree 3 does not go with 4 KV heads"),
        ({"block_size": 0}, "a size below 1"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(change: dict[str, object], word: str) -> None:
    assert refusal(layout(), replace(layout(), **change)) == f"layout: {word}"  # type: ignore[arg-type]


def test_pools_that_are_not_as_large_as_they_say_are_refused() -> None:
    shape = RankPool(layout(), 0, 2)
    good, short = np.zeros(shape.pool_bytes, np.uint8), np.zeros(shape.pool_bytes - 1, np.uint8)
    with pytest.raises(ValueError, match="values"):
        KVPool.of(shape, good, short)


def begin(
    writer: Writer,
    target: Side,
    epoch: int = 22,
    transfer_id: bytes = TRANSFER,
    until: float = float("inf"),
) -> None:
    reserved = replace(target.reserved([4, 2, 9], epoch=epoch), transfer_id=transfer_id)
    writer.start(reserved, [1, 5, 3], 40, until)
    writer.computed(transfer_id, range(40), range(3))
    writer.complete(transfer_id)


def test_a_call_that_fails_is_told_and_closed_after_it_has_settled() -> None:
    network = MemoryNetwork(lambda copy: Fault.FAILS_LANDED)
    source, target = pair(layout(), layout(), network)
    words = Words()
    with writers(source, words) as [writer]:
        begin(writer, target)
        assert words.next() == ("failed", "decode-0 did not answer")
        failed_at = time.monotonic()
        writer.stop(TRANSFER)
        assert words.next() == ("closed", True)
        assert time.monotonic() - failed_at >= 0.04
        assert writer.num_open == 0
        assert writer.counters.num_failures == 1


def test_a_stop_waits_for_the_call_that_runs_and_begins_no_other() -> None:
    runs, goes_on = threading.Event(), threading.Event()

    def wait(copy: Copy) -> Fault:
        runs.set()
        assert goes_on.wait(20)
        return Fault.NONE

    source, target = pair(layout(), layout(), MemoryNetwork(wait))
    words = Words()
    with writers(source, words) as [writer]:
        begin(writer, target)
        assert runs.wait(20)
        writer.stop(TRANSFER)
        time.sleep(0.05)
        assert words.said.empty(), "a call runs"
        goes_on.set()
        assert words.next() == ("closed", False)
        assert writer.counters.num_calls == 1


def test_no_call_begins_after_the_lease_though_nobody_says_stop() -> None:
    """As in a process that was stopped in the midst of a call, and goes on long after."""
    goes_on = threading.Event()

    def wait(copy: Copy) -> Fault:
        assert goes_on.wait(20)
        return Fault.NONE

    source, target = pair(layout(), layout(), MemoryNetwork(wait))
    words = Words()
    with writers(source, words) as [writer]:
        lease_s = 0.2
        begin(writer, target, until=time.monotonic() + lease_s)
        time.sleep(2 * lease_s)
        goes_on.set()
        assert words.next() == ("failed", "lease")
        assert writer.counters.num_calls == 1
        writer.stop(TRANSFER)
        assert words.next() == ("closed", False)
        assert writer.counters.num_calls == 1


def test_a_decode_worker_that_stands_still_holds_up_no_other() -> None:
    goes_on = threading.Event()
    network = MemoryNetwork()
    source, slow = pair(layout(), layout(), network)
    quick = Side.open(layout(), NUM_BLOCKS, lambda rank: network.join(f"quick-{rank}"))
    inside = range(slow.pools[0].keys_address, slow.pools[0].keys_address + slow.pools[0].keys.nbytes)

    def wait(copy: Copy) -> Fault:
        if copy.target in inside:
            assert goes_on.wait(20)
        return Fault.NONE

    network.fault = wait
    words = Words()
    with writers(source, words) as [writer]:
        begin(writer, slow)
        begin(writer, quick, epoch=23, transfer_id=b"q" * 16)
        assert words.next()[0] == "written"
        assert writer.num_open == 1
        goes_on.set()
        assert words.next()[0] == "written"


def test_calls_are_bounded_and_counted() -> None:
    source, target = pair(layout(), layout())
    words = Words()
    with writers(source, words) as [writer]:
        begin(writer, target)
        assert words.next()[0] == "written"
        counters = writer.counters
        assert counters.num_bytes == 40 * 4 * 16 * 2 * 3
        assert counters.num_copies == 3 * 2 * 3
        assert counters.num_calls >= counters.num_bytes / LIMITS.max_call_bytes
        assert counters.bytes_per_s > 0
        reserved = target.reserved([4, 2, 9])
        writer.start(reserved, [1, 5, 3], 40, float("inf"))
        with pytest.raises(ValueError, match="is written already"):
            writer.start(reserved, [1, 5, 3], 40, float("inf"))


def test_a_thread_ends_with_its_run_and_its_transfers() -> None:
    source, target = pair(layout(), layout())
    words = Words()
    with writers(source, words) as [writer]:
        begin(writer, target)
        writer.forget(1, 22)
        assert words.next()[0] == "written"
        deadline = time.monotonic() + 20
        while any(thread.name == "kv-writer-1" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_memory_that_nobody_registered_is_not_written() -> None:
    network = MemoryNetwork()
    source, target = pair(layout(), layout(), network)
    here, there = source.pools[0].keys_address, target.pools[0].keys_address
    for copy in (Copy(here, there - 64, 64), Copy(here - 64, there, 64)):
        with pytest.raises(TransferError, match="are not registered"):
            source.transports[0].write("decode-0", [copy])
    target.transports[0].close()
    with pytest.raises(TransferError, match="is not reached"):
        source.transports[0].write("decode-0", [Copy(here, there, 64)])
