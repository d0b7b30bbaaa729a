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
    """Holders take, share and return blocks in any order; a plain list of tables is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.tables: list[list[int]] = []

    @rule(n=st.integers(0, 14))
    def allocate(self, n: int) -> None:
        free = self.pool.num_free_blocks
        if n > free:
            with pytest.raises(NoFreeBlocksError):
                self.pool.allocate(n)
            assert self.pool.num_free_blocks == free
        else:
            self.tables.append(self.pool.allocate(n))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.share(table)
        self.tables.append(list(table))

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


TestPoolMachine = PoolMachine.TestCase
