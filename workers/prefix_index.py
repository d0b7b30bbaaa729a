"""The prefixes that a worker tells the fleet of: keys of what its pool has cached, at a few depths."""

from bisect import bisect_right
from collections import OrderedDict

from schemas.prefix_sketch import DEPTHS, MAX_KEYS, prefix_keys
from workers.block_hash import BlockHasher
from workers.block_pool import BlockPool
from workers.request import Request


class PrefixIndex:
    """Remembers the MAX_KEYS prefixes used last, each with the hash of its last block.

    Blocks that are handed out for something else are not followed: `keys` asks the pool. `num_notes` grows
    with all that is remembered.
    """

    def __init__(self, pool: BlockPool, hasher: BlockHasher) -> None:
        self.num_notes = 0
        self._pool = pool
        self._hasher = hasher
        # In blocks: depths that end within a block are nothing that can be found again.
        self._depths = [depth // pool.block_size for depth in DEPTHS if depth % pool.block_size == 0]
        self._last_block: OrderedDict[int, bytes] = OrderedDict()

    def note(self, request: Request, start: int, end: int) -> None:
        """Blocks `start` … `end` - 1 of the request are cached now, like those before them.

        Costs a look where no depth lies between, else the hash of the tokens up to there.
        """
        first, last = bisect_right(self._depths, start), bisect_right(self._depths, end)
        if first == last:
            return
        size = self._pool.block_size
        tokens = request.tokens(0, self._depths[last - 1] * size)
        keys = prefix_keys(tokens, self._hasher.salt(request.tenant), start * size)
        depths = (depth for depth in DEPTHS if start * size < depth <= len(tokens))
        self.num_notes += 1
        known = self._last_block
        for key, depth in zip(keys, depths, strict=True):
            if depth % size == 0:
                known[key] = request.block_hashes[depth // size - 1]
                known.move_to_end(key)
        while len(known) > MAX_KEYS:
            known.popitem(last=False)

    def keys(self) -> tuple[int, ...]:
        """Those whose blocks can still be found; 0.3 ms at most. Forgets the others."""
        gone = [key for key, last in self._last_block.items() if not self._pool.is_cached(last)]
        for key in gone:
            del self._last_block[key]
        return tuple(self._last_block)
