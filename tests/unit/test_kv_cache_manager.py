"""What the manager gives, finds and moves, call by call. Invariants: test_prefix_cache_properties.py."""

import itertools

import pytest

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.block_hash import BlockHasher, PrefixSharing
from workers.block_pool import BlockPool
from workers.kv_cache_manager import KVCacheManager, make_kv_cache_manager
from workers.request import Request

_numbers = itertools.count(1)


def make_manager(
    num_blocks: int = 20, num_host_blocks: int = 0, sharing: PrefixSharing = PrefixSharing.TENANT
) -> KVCacheManager:
    hasher = BlockHasher("model", "layout", sharing)
    return make_kv_cache_manager(num_blocks, num_host_blocks=num_host_blocks, hasher=hasher)


def make_request(prompt: list[int], output: list[int] | None = None, tenant: str = "a") -> Request:
    return Request(
        request_id=next(_numbers).to_bytes(16, "big"),
        attempt=1,
        priority=PriorityClass.INTERACTIVE,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=100),
        reply_partition=0,
        output_token_ids=output or [],
        tenant=tenant,
    )


def compute(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> Request:
    """Runs the request up to `num_tokens`, by default all: what one or more steps do."""
    if not request.block_table:
        manager.take_cached(request)
    missing = (request.num_tokens if num_tokens is None else num_tokens) - request.num_computed_tokens
    assert manager.allocate_slots(request, missing)
    request.num_computed_tokens += missing
    manager.cache_computed(request)
    return request


def release(manager: KVCacheManager, request: Request) -> None:
    manager.free(request)
    request.num_computed_tokens = 0


PREFIX = list(range(100, 148))  # three blocks


def test_a_hit_gives_the_very_blocks_that_a_miss_filled() -> None:
    manager = make_manager()
    first = compute(manager, make_request([*PREFIX, 1, 2, 3]))
    blocks = first.block_table
    release(manager, first)
    again = make_request([*PREFIX, 9, 9, 9, 9])
    assert manager.find_cached(again) == 48
    assert manager.take_cached(again) == 48
    assert again.block_table == blocks[:3]
    assert again.num_computed_tokens == 48


def test_a_running_prefix_is_shared() -> None:
    manager = make_manager()
    first = compute(manager, make_request([*PREFIX, 1]))
    second = compute(manager, make_request([*PREFIX, 2]))
    assert second.block_table[:3] == first.block_table[:3]
    assert second.block_table[3] != first.block_table[3], "what is written to is never shared"
    assert manager.pool.num_free_blocks == 15
    release(manager, first)
    assert [manager.pool.ref_cnt(block) for block in second.block_table] == [1, 1, 1, 1]


def test_output_is_found_as_well_as_prompt() -> None:
    manager = make_manager()
    release(manager, compute(manager, make_request(PREFIX[:20], PREFIX[20:])))
    assert manager.find_cached(make_request([*PREFIX, 1])) == 48
    assert manager.find_cached(make_request(PREFIX[:40], [*PREFIX[40:], 1])) == 48


@pytest.mark.parametrize(("num_tokens", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)])
def test_the_last_token_is_always_computed(num_tokens: int, cached: int) -> None:
    manager = make_manager()
    release(manager, compute(manager, make_request(PREFIX)))
    assert manager.find_cached(make_request(PREFIX[:num_tokens])) == cached


def test_only_computed_blocks_are_found() -> None:
    manager = make_manager()
    running = compute(manager, make_request([*PREFIX, 1]), 20)
    assert manager.find_cached(make_request([*PREFIX, 2])) == 16
    compute(manager, running, 31)
    assert manager.find_cached(make_request([*PREFIX, 2])) == 16
    compute(manager, running, 32)
    assert manager.find_cached(make_request([*PREFIX, 2])) == 32


def test_a_prefix_is_found_up_to_the_first_token_that_differs() -> None:
    manager = make_manager()
    release(manager, compute(manager, make_request(PREFIX)))
    assert manager.find_cached(make_request([*PREFIX[:20], 0, *PREFIX[21:], 1])) == 16
    assert manager.find_cached(make_request([0, *PREFIX[1:], 1])) == 0


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(["a", "b", ""], 2)])
def test_tenants_do_not_find_one_anothers_blocks(one: str, other: str) -> None:
    manager = make_manager()
    held = compute(manager, make_request(PREFIX, tenant=one))
    stranger = make_request(PREFIX, tenant=other)
    assert manager.find_cached(stranger) == 0
    compute(manager, stranger)
    assert set(stranger.block_table).isdisjoint(held.block_table)
    release(manager, held)
    release(manager, stranger)
    assert manager.find_cached(make_request(PREFIX, tenant=one)) == 32
    assert manager.find_cached(make_request(PREFIX, tenant=other)) == 32
    assert manager.pool.num_cached_blocks == 6


def test_tenants_that_share_do() -> None:
    manager = make_manager(sharing=PrefixSharing.SHARED)
    release(manager, compute(manager, make_request(PREFIX, tenant="a")))
    assert manager.find_cached(make_request(PREFIX, tenant="b")) == 32


def test_nothing_stale_is_found_after_eviction() -> None:
    manager = make_manager(num_blocks=4)
    release(manager, compute(manager, make_request(PREFIX)))
    compute(manager, make_request([1] * 33))  # takes the free block, then evicts the last two
    assert manager.pool.evictions == 2
    assert manager.find_cached(make_request([*PREFIX, 1])) == 16, "the head of a prefix goes last"
    other = compute(manager, make_request([2] * 16))
    assert manager.find_cached(make_request([*PREFIX, 1])) == 0
    assert manager.find_cached(make_request([2] * 17)) == 16
    release(manager, other)


def test_a_prefix_larger_than_the_pool_under_churn_is_found_as_far_as_it_is_there() -> None:
    manager = make_manager(num_blocks=6)
    long = [token % 50 for token in range(16 * 5)]
    for number in range(20):
        request = compute(manager, make_request([*long, number]))
        assert len(request.block_table) == 6
        release(manager, request)
        other = compute(manager, make_request([1000 + number] * 30))
        found = manager.find_cached(make_request([*long, number]))
        assert found == 16 * 5 - 16, (
            "the stranger's first block was free; its second took the tail of the prefix"
        )
        release(manager, other)


def test_looking_takes_nothing_and_hashes_once() -> None:
    manager = make_manager()
    release(manager, compute(manager, make_request(PREFIX)))
    waiting = make_request([*PREFIX, 1])
    for _ in range(3):
        assert manager.find_cached(waiting) == 48
    assert waiting.block_table == []
    assert len(waiting.block_hashes) == 3
    assert manager.num_free_blocks == 20
    assert manager.prefix_cache_queries == 48, "looking is not asking"


def test_counts_free_blocks_that_an_admission_takes() -> None:
    manager = make_manager()
    first = compute(manager, make_request(PREFIX))
    waiting = make_request([*PREFIX, *PREFIX])
    assert manager.num_new_blocks_for(waiting, 96) == 3, "three are held by the first"
    release(manager, first)
    assert manager.num_new_blocks_for(waiting, 96) == 6, "three cached ones would come off the free list"
    assert manager.num_new_blocks_for(waiting, 10) == 3, "hits are taken whole"
    before = manager.num_free_blocks
    needed = manager.num_new_blocks_for(waiting, 96)
    compute(manager, waiting)
    assert manager.num_free_blocks == before - needed
    assert manager.num_new_blocks_for(waiting, 96) == 0
    assert manager.num_new_blocks_for(waiting, 97) == 1


def test_hits_and_queries_are_counted_in_tokens_at_first_admission() -> None:
    manager = make_manager()
    compute(manager, make_request([*PREFIX, 1]))
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (49, 0)
    second = compute(manager, make_request([*PREFIX, 2]))
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (98, 48)
    release(manager, second)
    second.num_preemptions = 1
    assert manager.take_cached(second) == 48
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (98, 48)


def test_next_block_hash_names_the_block_that_another_request_is_computing() -> None:
    manager = make_manager()
    computing, waiting = make_request([*PREFIX, 1]), make_request([*PREFIX, 2])
    names = [manager.next_block_hash(computing, index) for index in range(4)]
    assert names == [manager.next_block_hash(waiting, index) for index in range(4)]
    assert names[3] is None, "one token does not fill a block"
    assert None not in names[:3]
    assert manager.next_block_hash(make_request(PREFIX, tenant="b"), 0) not in names


def test_without_a_hasher_nothing_is_found() -> None:
    manager = KVCacheManager(BlockPool(20))
    release(manager, compute(manager, make_request(PREFIX)))
    again = make_request(PREFIX)
    assert manager.find_cached(again) == 0
    assert manager.take_cached(again) == 0
    assert manager.next_block_hash(again, 0) is None
    assert manager.pool.num_cached_blocks == 0
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (0, 0)


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    manager = make_manager(num_blocks=2)
    request = make_request(PREFIX)
    assert not manager.allocate_slots(request, 48)
    assert request.block_table == []
    assert manager.num_free_blocks == 2


def test_swap_moves_the_computed_blocks_and_back() -> None:
    manager = make_manager(num_blocks=5, num_host_blocks=3)
    request = compute(manager, make_request(PREFIX), 40)
    device_blocks = request.block_table
    pairs = manager.swap_out(request)
    assert pairs == list(zip(device_blocks, request.host_block_table, strict=True))
    assert (request.block_table, request.num_computed_tokens) == ([], 40)
    assert manager.num_free_blocks == 5
    assert manager.host_pool is not None
    assert manager.host_pool.num_free_blocks == 0

    stranger = compute(manager, make_request([1] * 80))  # evicts all
    release(manager, stranger)
    host_blocks = request.host_block_table
    assert manager.swap_in(request) == list(zip(host_blocks, request.block_table, strict=True))
    assert (request.host_block_table, request.num_computed_tokens) == ([], 40)
    assert manager.host_pool.num_free_blocks == 0, "this step copies from them"
    manager.release_swapped_in()
    assert manager.host_pool.num_free_blocks == 3


def test_swap_in_takes_what_the_cache_still_holds_from_there() -> None:
    manager = make_manager(num_blocks=5, num_host_blocks=3)
    request = compute(manager, make_request(PREFIX), 40)
    head = request.block_table[:2]
    assert manager.swap_out(request) is not None
    pairs = manager.swap_in(request)
    assert request.block_table[:2] == head
    assert pairs is not None
    assert len(pairs) == 1


def test_a_swapped_request_takes_no_cached_block_for_one_that_it_has_not_filled() -> None:
    manager = make_manager(num_blocks=6, num_host_blocks=3)
    request = compute(manager, make_request([*PREFIX, 1]), 40)
    assert manager.swap_out(request) is not None
    other = compute(manager, make_request([*PREFIX, 2]))  # fills the third block, and holds it
    before = manager.num_free_blocks
    assert manager.num_new_blocks_for(request, 40) == 1
    pairs = manager.swap_in(request)
    assert manager.num_free_blocks == before - 1
    assert pairs is not None
    assert len(pairs) == 1
    assert request.block_table[:2] == other.block_table[:2]
    assert request.block_table[2] != other.block_table[2]


def test_blocks_that_a_swap_fills_are_found_only_after_the_step() -> None:
    manager = make_manager(num_blocks=5, num_host_blocks=3)
    request = compute(manager, make_request([*PREFIX, 1]), 48)
    assert manager.swap_out(request) is not None
    release(manager, compute(manager, make_request([1] * 80)))
    assert manager.swap_in(request) is not None
    assert manager.find_cached(make_request([*PREFIX, 1])) == 0
    manager.cache_computed(request)
    assert manager.find_cached(make_request([*PREFIX, 1])) == 48


def test_swaps_that_do_not_fit_change_nothing() -> None:
    manager = make_manager(num_blocks=3, num_host_blocks=2)
    request = compute(manager, make_request(PREFIX))
    assert manager.swap_out(request) is None, "three blocks, two on the host"
    assert len(request.block_table) == 3
    assert KVCacheManager(BlockPool(3)).swap_out(request) is None

    manager = make_manager(num_blocks=3, num_host_blocks=3)
    request = compute(manager, make_request(PREFIX))
    assert manager.swap_out(request) is not None
    compute(manager, make_request([1]))
    assert manager.swap_in(request) is None
    assert len(request.host_block_table) == 3
    assert manager.num_free_blocks == 2


def test_freeing_a_swapped_request_frees_its_host_blocks() -> None:
    manager = make_manager(num_host_blocks=3)
    request = compute(manager, make_request(PREFIX))
    assert manager.swap_out(request) is not None
    manager.free(request)
    assert manager.host_pool is not None
    assert manager.host_pool.num_free_blocks == 3
    assert request.host_block_table == []


def test_fragmentation_counts_slots_without_a_computed_token() -> None:
    manager = make_manager()
    assert manager.fragmentation([]) == 0.0
    first = compute(manager, make_request([*PREFIX, 1]))  # 4 blocks, 49 tokens
    assert manager.fragmentation([first]) == pytest.approx(15 / 64)
    second = compute(manager, make_request([*PREFIX, 2, 3]))  # one block of its own, 2 tokens
    assert manager.num_unused_slots([first, second]) == 15 + 14
    assert manager.fragmentation([first, second]) == pytest.approx(29 / 80)


def test_refuses_parts_of_different_block_sizes() -> None:
    with pytest.raises(ValueError, match=r"block sizes differ: \[16, 32\]"):
        KVCacheManager(BlockPool(2, 16), host_pool=BlockPool(2, 32))
