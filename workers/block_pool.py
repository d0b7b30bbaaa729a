"""The KV blocks of one engine: who holds how many, which are free, and which contents can be found again."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

BLOCK_SIZE = 16
"""Tokens of a block."""


class NoFreeBlocksError(RuntimeError):
    """More blocks were asked for than are free. The caller should have looked at `num_free_blocks`."""


class BlockPool:
    """A fixed number of blocks, ids 0 … num_blocks - 1, each with a reference count.

    A block is free exactly when its count is 0. A block can be cached: its contents have a hash, under which
    it is found until the block is handed out for something else, even while it is free. At most one block is
    cached under a hash.

    `allocate` hands out free blocks that are not cached first, the one that was free for the longest before
    the others; then cached ones, the least recently freed first. `evictions` counts the latter.
    """

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self._ref_cnt = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        # Not a dict: taking the first key of one passes over all that were deleted before it.
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out, cached or not."""
        return len(self._free) + len(self._free_cached)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their hash, held or free."""
        return len(self._cached)

    def ref_cnt(self, block: int) -> int:
        """How many block tables hold `block`."""
        return self._ref_cnt[block]

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks cached under `hashes`, up to the first hash that has none."""
        found: list[int] = []
        cached_under = self._cached.get
        for block_hash in hashes:
            block = cached_under(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def is_cached(self, block_hash: bytes) -> bool:
        """Whether a block can be found under the hash."""
        return block_hash in self._cached

    def hash_of(self, block: int) -> bytes | None:
        """Under which it is cached; None if it is not."""
        return self._hashes[block]

    def forget_cached(self) -> None:
        """No block is found by its hash any more. Those who hold one keep it."""
        self._hashes = [None] * self.num_blocks
        self._cached.clear()
        self._free += self._free_cached
        self._free_cached.clear()

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of the distinct `blocks` are free."""
        ref_cnt = self._ref_cnt
        return sum(not ref_cnt[block] for block in blocks)

    def cache(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """From now on each block is found under its hash, unless another one is already.

        Raises ValueError for a block that nobody holds, or that is cached under another hash.
        """
        for block, block_hash in zip(blocks, hashes, strict=True):
            if self._ref_cnt[block] < 1:
                raise ValueError(f"block {block} is free: nobody vouches for its contents")
            known = self._hashes[block]
            if known is not None and known != block_hash:
                raise ValueError(f"block {block} is cached under another hash")
            if self._cached.setdefault(block_hash, block) == block:
                self._hashes[block] = block_hash

    def allocate(self, n: int) -> list[int]:
        """`n` free blocks, each now held once and not cached. All or nothing.

        Raises NoFreeBlocksError when fewer than `n` are free.
        """
        free = self._free
        if n > len(free) + len(self._free_cached):
            raise NoFreeBlocksError(
                f"{n} blocks asked for, {self.num_free_blocks} of {self.num_blocks} are free"
            )
        blocks = [free.popleft() for _ in range(min(n, len(free)))]
        while len(blocks) < n:
            blocks.append(self._evict())
        ref_cnt = self._ref_cnt
        for block in blocks:
            ref_cnt[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block; a free one that is cached is free no longer.

        Raises ValueError, changing nothing, if one of them is free and not cached.
        """
        shared = list(blocks)
        for block in shared:
            if self._ref_cnt[block] < 1 and self._hashes[block] is None:
                raise ValueError(f"block {block} is free and cannot be shared")
        for block in shared:
            if not self._ref_cnt[block]:
                del self._free_cached[block]
            self._ref_cnt[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less for each block; at 0 it is free, and the last one to be handed out of its kind.

        Raises ValueError at a block that nobody holds: two tables believed that they owned it.
        """
        ref_cnt, hashes, free = self._ref_cnt, self._hashes, self._free
        for block in blocks:
            count = ref_cnt[block] - 1
            if count < 0:
                raise ValueError(f"block {block} is freed twice")
            ref_cnt[block] = count
            if count == 0:
                if hashes[block] is None:
                    free.append(block)
                else:
                    self._free_cached[block] = None

    def _evict(self) -> int:
        block, _ = self._free_cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None, "only cached blocks are in _free_cached"
        del self._cached[block_hash]
        self._hashes[block] = None
        self.evictions += 1
        return block


def num_blocks_for(memory_bytes: int, bytes_per_block: int) -> int:
    """How many blocks fit a memory budget (both in bytes). Raises ValueError if not even one does."""
    if bytes_per_block < 1:
        raise ValueError(f"bytes_per_block must be positive, got {bytes_per_block}")
    num_blocks = memory_bytes // bytes_per_block
    if num_blocks < 1:
        raise ValueError(f"a KV budget of {memory_bytes} bytes holds no block of {bytes_per_block} bytes")
    return num_blocks
