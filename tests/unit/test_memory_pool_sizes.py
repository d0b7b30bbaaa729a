import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.pool_sizes import (
    KV_SHARE,
    MARGIN_BYTES,
    MIB,
    MOST_UNASKED_BYTES,
    MemoryProfile,
    PoolSizes,
    plan_pools,
)

MARGIN_MIB = MARGIN_BYTES // MIB


def plan(
    available_mib: int,
    *,
    kv: int | None = 100,
    swap: int = 50,
    peak_mib: int = 30,
    bytes_per_block: int = MIB,
) -> PoolSizes:
    return plan_pools(
        MemoryProfile(available_mib * MIB, peak_mib * MIB),
        kv_memory_mib=kv,
        swap_memory_mib=swap,
        bytes_per_block=bytes_per_block,
    )


def test_gives_what_was_asked_for_when_it_fits_to_the_last_byte() -> None:
    assert plan(180 + MARGIN_MIB) == PoolSizes(100, 50)
    with pytest.raises(ValueError, match="do not fit"):
        plan(179 + MARGIN_MIB)


def test_no_swap_is_no_host_block() -> None:
    assert plan(1000, swap=0) == PoolSizes(100, 0)


def test_empty_takes_a_share_of_what_is_left() -> None:
    assert plan(1080 + MARGIN_MIB, kv=None) == PoolSizes(int(1000 * KV_SHARE), 50)


def test_empty_takes_no_more_than_a_cautious_amount() -> None:
    assert plan(100_000, kv=None).num_blocks * MIB == MOST_UNASKED_BYTES


def test_a_pool_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="HEADRACE_KV_MEMORY_MIB is 1: raise it, a block takes 2097152"):
        plan(1000, kv=1, bytes_per_block=2 * MIB)


@pytest.mark.parametrize(
    ("room_mib", "advice"),
    [
        (120, "lower HEADRACE_KV_MEMORY_MIB to at most 70"),
        (50, "set HEADRACE_SWAP_MEMORY_MIB to 0 and HEADRACE_KV_MEMORY_MIB to at most 50"),
        (0, "lower HEADRACE_MAX_NUM_SEQS or HEADRACE_MAX_NUM_BATCHED_TOKENS"),
        (-500, "lower HEADRACE_MAX_NUM_SEQS or HEADRACE_MAX_NUM_BATCHED_TOKENS"),
    ],
)
def test_says_which_setting_to_lower(room_mib: int, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        plan(MARGIN_MIB + 600 + room_mib, peak_mib=600)


def test_a_swap_pool_that_is_too_large_is_named() -> None:
    with pytest.raises(ValueError, match="lower HEADRACE_SWAP_MEMORY_MIB to at most 20"):
        plan(MARGIN_MIB + 30 + 120, swap=400)


def test_the_refusal_says_where_the_memory_goes() -> None:
    with pytest.raises(
        ValueError, match=f"400 MiB are available, a step takes up to 30 and {MARGIN_MIB} are"
    ):
        plan(400)


@given(
    available=st.integers(0, 3000),
    kv=st.none() | st.integers(1, 2000),
    swap=st.integers(0, 2000),
    peak=st.integers(0, 1000),
    per_block=st.integers(1, 4 * MIB),
)
def test_what_is_planned_fits_and_the_advice_works(
    available: int, kv: int | None, swap: int, peak: int, per_block: int
) -> None:
    for _ in range(2):
        try:
            sizes = plan(available, kv=kv, swap=swap, peak_mib=peak, bytes_per_block=per_block)
        except ValueError as error:
            refusal = str(error)
        else:
            assert sizes.num_blocks >= 1
            pools = (sizes.num_blocks + sizes.num_host_blocks) * per_block
            assert pools + peak * MIB + MARGIN_BYTES <= available * MIB
            return
        advised = dict(re.findall(r"HEADRACE_(KV|SWAP)_MEMORY_MIB to (?:at most )?(\d+)", refusal))
        if not advised:
            assert "raise it" in refusal or "no memory is left" in refusal
            return
        kv, swap = int(advised.get("KV", kv or 0)) or None, int(advised.get("SWAP", swap))
    raise AssertionError(f"the advice did not work: {refusal}")
