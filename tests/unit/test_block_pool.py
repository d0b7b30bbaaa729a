import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.block_pool import BlockPool, NoFreeBlocksError, num_blocks_for


def test_allocates_every_block_once_and_then_raises() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate(2) + pool.allocate(1)) == [0, 1, 2]
    with pytest.raises(NoFreeBlocksError, match="1 blocks asked for, 0 of 3"):
        pool.allocate(1)


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(NoFreeBlocksError):
        pool.allocate(4)
    assert pool.num_free_blocks == 3


def test_a_double_free_raises() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(blocks)


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free_blocks == 1
    pool.free(blocks)
    assert pool.num_free_blocks == 2


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([*held, 1])
    assert pool.ref_cnt(held[0]) == 1


def test_a_cached_block_is_found_while_it_is_held_and_while_it_is_free() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.cache(blocks, [b"a", b"b"])
    assert pool.find([b"a", b"b", b"c"]) == blocks
    pool.free(blocks)
    assert pool.num_free_blocks == 3
    assert pool.find([b"a", b"b"]) == blocks
    assert pool.find([b"x", b"a"]) == []


def test_a_free_cached_block_that_is_shared_is_not_handed_out() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache([block], [b"a"])
    pool.free([block])
    pool.share([block, block])
    assert (pool.ref_cnt(block), pool.num_free_blocks) == (2, 1)
    assert pool.allocate(1) != [block]


def test_uncached_blocks_are_handed_out_before_cached_ones_and_those_by_last_use() -> None:
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    pool.cache([a, b, c], [b"a", b"b", b"c"])
    pool.free([a, b, c, d])
    pool.share([a])
    pool.free([a])
    assert pool.allocate(1) == [d]
    assert pool.evictions == 0
    assert pool.allocate(3) == [b, c, a]
    assert pool.evictions == 3


def test_an_evicted_block_is_not_found_and_can_be_cached_anew() -> None:
    pool = BlockPool(1)
    pool.cache(pool.allocate(1), [b"a"])
    pool.free([0])
    pool.allocate(1)
    assert pool.find([b"a"]) == []
    assert pool.num_cached_blocks == 0
    pool.cache([0], [b"b"])
    assert pool.find([b"b"]) == [0]


def test_what_is_forgotten_is_not_found_and_whoever_holds_it_keeps_it() -> None:
    pool = BlockPool(4)
    held, free = pool.allocate(2)
    pool.cache([held, free], [b"held", b"free"])
    assert pool.hash_of(held) == b"held"
    pool.free([free])
    pool.forget_cached()
    assert pool.hash_of(held) is None
    assert pool.find([b"held"]) == pool.find([b"free"]) == []
    assert (pool.num_free_blocks, pool.num_cached_blocks, pool.ref_cnt(held)) == (3, 0, 1)
    pool.cache([held], [b"anew"])
    assert pool.find([b"anew"]) == [held]
    pool.free([held])
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert pool.evictions == 1


def test_the_first_of_two_blocks_with_equal_contents_is_the_one_that_is_found() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.cache(blocks, [b"a", b"a"])
    assert pool.find([b"a"]) == blocks[:1]
    pool.free(blocks)
    assert pool.allocate(1) == blocks[1:], "the second was never cached"


def test_caching_again_under_the_same_hash_changes_nothing() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.cache(blocks[:1], [b"a"])
    pool.cache(blocks, [b"a", b"b"])
    assert pool.num_cached_blocks == 2


def test_a_free_block_cannot_be_cached() -> None:
    with pytest.raises(ValueError, match="block 0 is free"):
        BlockPool(1).cache([0], [b"a"])


def test_a_block_cannot_be_cached_under_two_hashes() -> None:
    pool = BlockPool(1)
    pool.cache(pool.allocate(1), [b"a"])
    with pytest.raises(ValueError, match="another hash"):
        pool.cache([0], [b"b"])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (1, 0)])
def test_refuses_impossible_sizes(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        BlockPool(num_blocks, block_size)


@given(st.integers(1, 10**12), st.integers(1, 10**9))
def test_num_blocks_for_fills_the_budget_and_not_more(memory: int, per_block: int) -> None:
    if memory < per_block:
        with pytest.raises(ValueError, match="holds no block"):
            num_blocks_for(memory, per_block)
    else:
        blocks = num_blocks_for(memory, per_block)
        assert blocks * per_block <= memory < (blocks + 1) * per_block


class PoolMachine(RuleBasedStateMachine):
    """Holders take, cache, share and return blocks in any order; plain lists and a dict are the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.tables: list[list[int]] = []
        self.cached: dict[bytes, int] = {}

    @rule(n=st.integers(0, 14))
    def allocate(self, n: int) -> None:
        free = self.pool.num_free_blocks
        if n > free:
            with pytest.raises(NoFreeBlocksError):
                self.pool.allocate(n)
            assert self.pool.num_free_blocks == free
            return
        evictions = self.pool.evictions
        blocks = self.pool.allocate(n)
        self.tables.append(blocks)
        evicted = [h for h, block in self.cached.items() if block in blocks]
        assert self.pool.evictions == evictions + len(evicted)
        for block_hash in evicted:
            del self.cached[block_hash]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), number=st.integers(0, 5))
    def cache(self, data: st.DataObject, number: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        known = set(self.cached.values())
        hashes = [b"%d/%d" % (number, index) for index in range(len(table))]
        pairs = [(block, h) for block, h in zip(table, hashes, strict=True) if block not in known]
        self.pool.cache([block for block, _ in pairs], [h for _, h in pairs])
        for block, block_hash in pairs:
            self.cached.setdefault(block_hash, block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share_cached(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.cached.values())), unique=True))
        self.pool.share(blocks)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)

    @invariant()
    def counts_balance(self) -> None:
        held = [block for table in self.tables for block in table]
        for block in range(self.pool.num_blocks):
            assert self.pool.ref_cnt(block) == held.count(block)
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(set(held))

    @invariant()
    def the_cache_holds_what_the_model_holds(self) -> None:
        assert self.pool.num_cached_blocks == len(self.cached)
        for block_hash, block in self.cached.items():
            assert self.pool.find([block_hash]) == [block]


TestPoolMachine = PoolMachine.TestCase
