"""The KV blocks of one engine: who holds how many of them, and which are free."""

from collections import deque
from collections.abc import Iterable


class NoFreeBlocksError(RuntimeError):
    """More blocks were asked for than are free. The caller should have looked at `num_free_blocks`."""


class BlockPool:
    """A fixed number of blocks, ids 0 … num_blocks - 1, each with a reference count.

    A block is free exactly when its count is 0. Freed blocks go to the tail of the free list, so the one
    that was free for the longest is handed out first.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._ref_cnt = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def ref_cnt(self, block: int) -> int:
        """How many block tables hold `block`."""
        return self._ref_cnt[block]

    def allocate(self, n: int) -> list[int]:
        """`n` free blocks, each now held once. All or nothing.

        Raises NoFreeBlocksError when fewer than `n` are free.
        """
        free = self._free
        if n > len(free):
            raise NoFreeBlocksError(f"{n} blocks asked for, {len(free)} of {self.num_blocks} are free")
        blocks = [free.popleft() for _ in range(n)]
        for block in blocks:
            self._ref_cnt[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block. Raises ValueError, changing nothing, if one of them is free."""
        held = list(blocks)
        for block in held:
            if self._ref_cnt[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
        for block in held:
            self._ref_cnt[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less for each block; at 0 it returns to the free list.

        Raises ValueError at a block that nobody holds: two tables believed that they owned it.
        """
        for block in blocks:
            count = self._ref_cnt[block] - 1
            if count < 0:
                raise ValueError(f"block {block} is freed twice")
            self._ref_cnt[block] = count
            if count == 0:
                self._free.append(block)


def num_blocks_for(memory_bytes: int, bytes_per_block: int) -> int:
    """How many blocks fit a memory budget (both in bytes). Raises ValueError if not even one does."""
    if bytes_per_block < 1:
        raise ValueError(f"bytes_per_block must be positive, got {bytes_per_block}")
    num_blocks = memory_bytes // bytes_per_block
    if num_blocks < 1:
        raise ValueError(f"a KV budget of {memory_bytes} bytes holds no block of {bytes_per_block} bytes")
    return num_blocks
