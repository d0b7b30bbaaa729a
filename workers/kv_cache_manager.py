"""Which blocks a request holds. The only code that writes its block tables and block hashes."""

from collections.abc import Iterable, Iterator, Sequence

from workers.block_hash import BlockHasher
from workers.block_pool import BLOCK_SIZE, BlockPool
from workers.prefix_index import PrefixIndex
from workers.request import Request


class KVCacheManager:
    """Gives blocks of the device pool to requests, finds computed ones again, and swaps.

    Only full, computed blocks are ever found by others, so nobody writes to a block that is shared: what a
    request adds goes to blocks of its own. `hasher` None: nothing is found again. `host_pool` None: nothing
    is swapped. `prefix_index` knows what the fleet is told of the cache, None without a hasher.

    `prefix_cache_queries` counts the tokens of all requests at their first admission,
    `prefix_cache_hits` those of them that the cache held.
    """

    def __init__(
        self, pool: BlockPool, *, host_pool: BlockPool | None = None, hasher: BlockHasher | None = None
    ) -> None:
        """Raises ValueError when the parts have different block sizes."""
        sizes = {part.block_size for part in (pool, host_pool, hasher) if part is not None}
        if len(sizes) > 1:
            raise ValueError(f"block sizes differ: {sorted(sizes)}")
        self.pool = pool
        self.host_pool = host_pool
        self.hasher = hasher
        self.block_size = pool.block_size
        self.prefix_index = None if hasher is None else PrefixIndex(pool, hasher)
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        # Host blocks that the step which is now being planned, or computed, copies from.
        self._swapping_in: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_cached(self, request: Request) -> int:
        """Tokens of a request without blocks that the cache holds now. Takes nothing.

        They fill blocks, and are never all of the request's: its last token has to be computed, for
        something must be sampled from.
        """
        return len(self._find(request)) * self.block_size

    def num_new_blocks_for(self, request: Request, num_tokens: int) -> int:
        """Free blocks that it takes to hold the first `num_tokens` tokens of the request.

        For a request without blocks (waiting, or swapped out), a cached block that is free counts, one that
        others hold does not.
        """
        needed = self.num_blocks_for(num_tokens)
        if request.block_table:
            return max(0, needed - len(request.block_table))
        cached = self._find_swapped(request) if request.host_block_table else self._find(request)
        return max(needed, len(cached)) - len(cached) + self.pool.num_free_among(cached)

    def next_block_hash(self, request: Request, index: int) -> bytes | None:
        """The hash of block `index` of the request; None if its tokens do not fill it yet, or no cache is on.

        Blocks whose hashes are equal hold the same KV, whoever computes them first.
        """
        if self.hasher is None or (index + 1) * self.block_size > request.num_tokens:
            return None
        return self._hashes(request, index + 1)[index]

    def take_cached(self, request: Request) -> int:
        """Gives a request without blocks all that `find_cached` sees, as computed. Returns its tokens."""
        assert not request.block_table
        cached = self._find(request)
        num_tokens = len(cached) * self.block_size
        if self.hasher is not None and not request.num_preemptions:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_tokens
        self.pool.share(cached)
        if cached and self.prefix_index is not None:
            self.prefix_index.note(request, 0, len(cached))
        request.block_table = cached
        request.num_computed_tokens = num_tokens
        request.num_registered_blocks = len(cached)
        return num_tokens

    def allocate_slots(self, request: Request, num_new_tokens: int) -> bool:
        """Gives the request blocks for `num_new_tokens` beyond what it has computed.

        False, with nothing changed, when too few blocks are free.
        """
        missing = self._num_missing_blocks(request, num_new_tokens)
        if missing > 0:
            if missing > self.pool.num_free_blocks:
                return False
            request.block_table += self.pool.allocate(missing)
        return True

    def append_blocks(self, requests: Sequence[Request]) -> Iterator[Request]:
        """One block more for each, in their order; yields each when it has it.

        Raises NoFreeBlocksError, with nothing changed.
        """
        for request, block in zip(requests, self.pool.allocate(len(requests)), strict=True):
            request.block_table.append(block)
            yield request

    def cache_computed(self, request: Request) -> None:
        """Lets others find the full blocks up to `num_computed_tokens`. To be called when a step is over."""
        num_full = request.num_computed_tokens // self.block_size
        known = request.num_registered_blocks
        if num_full <= known or self.prefix_index is None:
            return
        hashes = self._hashes(request, num_full)
        self.pool.cache(request.block_table[known:num_full], hashes[known:num_full])
        request.num_registered_blocks = num_full
        self.prefix_index.note(request, known, num_full)

    def free(self, request: Request) -> None:
        """Takes all blocks back, on the device and on the host. What was found by others stays findable.

        The last ones first: the head of a prefix is the likeliest to be of use again.
        """
        self.pool.free(reversed(request.block_table))
        request.block_table = []
        request.num_registered_blocks = 0
        if request.host_block_table:
            assert self.host_pool is not None
            self.host_pool.free(request.host_block_table)
            request.host_block_table = []

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Moves the computed KV to the host: pairs (device block, host block) to copy in this step.

        The device blocks are free at once, for the copies come before anything else in a step. None, with
        nothing changed, when too few host blocks are free. `num_computed_tokens` stays. Not for a request
        that came in in this very step: its blocks may not be filled yet.
        """
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        if self.host_pool is None or num_blocks > self.host_pool.num_free_blocks:
            return None
        request.host_block_table = self.host_pool.allocate(num_blocks)
        pairs = list(zip(request.block_table, request.host_block_table, strict=False))
        self.pool.free(reversed(request.block_table))
        request.block_table = []
        request.num_registered_blocks = 0
        return pairs

    def swap_in(self, request: Request) -> list[tuple[int, int]] | None:
        """Brings the KV of a swapped request back: pairs (host block, device block) to copy in this step.

        Leading blocks that the cache holds are taken from there. None, with nothing changed, when too few
        device blocks are free. The host blocks stay taken until `release_swapped_in`.
        """
        host_blocks = request.host_block_table
        cached = self._find_swapped(request)
        num_new = len(host_blocks) - len(cached)
        if num_new + self.pool.num_free_among(cached) > self.pool.num_free_blocks:
            return None
        self.pool.share(cached)
        request.block_table = cached + self.pool.allocate(num_new)
        # The others are filled by this step: `cache_computed` registers them after it.
        request.num_registered_blocks = len(cached)
        request.host_block_table = []
        self._swapping_in += host_blocks
        return list(zip(host_blocks[len(cached) :], request.block_table[len(cached) :], strict=True))

    def release_swapped_in(self) -> None:
        """Frees the host blocks of all `swap_in` so far. To be called when the step that copies them is over.

        Earlier, the same step could swap another request out to them, and that is copied first.
        """
        if self._swapping_in:
            assert self.host_pool is not None
            self.host_pool.free(self._swapping_in)
            self._swapping_in = []

    def fragmentation(self, requests: Iterable[Request]) -> float:
        """The share of the slots in held blocks that hold no computed token, 0 … 1.

        `requests` are all that hold device blocks. A shared block counts once, and is always full.
        """
        held = (self.pool.num_blocks - self.pool.num_free_blocks) * self.block_size
        return self.num_unused_slots(requests) / held if held else 0.0

    def num_unused_slots(self, requests: Iterable[Request]) -> int:
        """Slots that are allocated to `requests` and not computed."""
        size = self.block_size
        return sum(len(r.block_table) * size - r.num_computed_tokens for r in requests if r.block_table)

    def _num_missing_blocks(self, request: Request, num_new_tokens: int) -> int:
        return self.num_blocks_for(request.num_computed_tokens + num_new_tokens) - len(request.block_table)

    def _find(self, request: Request) -> list[int]:
        """The leading cached blocks, without the one that holds the request's last token."""
        if self.hasher is None:
            return []
        num_blocks = (request.num_tokens - 1) // self.block_size
        hashes = self._hashes(request, num_blocks)
        return self.pool.find(hashes if len(hashes) == num_blocks else hashes[:num_blocks])

    def _find_swapped(self, request: Request) -> list[int]:
        """Of these, the blocks that a swapped request had computed in full: it writes on in the next one."""
        return self._find(request)[: request.num_computed_tokens // self.block_size]

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The request's block hashes, at least `num_blocks` of them."""
        hashes = request.block_hashes
        if len(hashes) < num_blocks:
            assert self.hasher is not None
            tokens = request.tokens(len(hashes) * self.block_size, num_blocks * self.block_size)
            self.hasher.extend(hashes, tokens, request.tenant)
        return hashes


def make_kv_cache_manager(
    num_blocks: int,
    *,
    num_host_blocks: int = 0,
    hasher: BlockHasher | None = None,
    block_size: int = BLOCK_SIZE,
) -> KVCacheManager:
    """A manager with pools of its own; no host pool for 0 host blocks."""
    host_pool = BlockPool(num_host_blocks, block_size) if num_host_blocks else None
    return KVCacheManager(BlockPool(num_blocks, block_size), host_pool=host_pool, hasher=hasher)
