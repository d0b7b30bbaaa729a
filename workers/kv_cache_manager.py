"""Which blocks a request holds. The only code that writes `Request.block_table`."""

from workers.block_pool import BlockPool
from workers.request import Request


class KVCacheManager:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

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

    def free(self, request: Request) -> None:
        """Takes all blocks back. The last ones first: they are the least likely to be of use again."""
        self.pool.free(reversed(request.block_table))
        request.block_table = []

    def _num_missing_blocks(self, request: Request, num_new_tokens: int) -> int:
        return self.num_blocks_for(request.num_computed_tokens + num_new_tokens) - len(request.block_table)
