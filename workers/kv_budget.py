"""Who may enter the running batch, by the blocks that all in it are expected to take before they end."""

from math import ceil

from schemas.priority import PriorityClass
from workers.expected_length import ExpectedLengths
from workers.kv_cache_manager import KVCacheManager
from workers.request import Request
from workers.running_batch import RunningBatch


class KVBudget:
    """Promises blocks and takes none: a sequence gets them as its tokens come.

    What a class was promised is kept from equal and lower ones. Higher ones do not heed it: they take the
    blocks, and the lower class gives way. `watermark` is the share of the pool that class batch leaves free.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, running: RunningBatch, watermark: float) -> None:
        self.lengths = ExpectedLengths()
        self._kv = kv_cache_manager
        self._running = running
        self._num_kept_free = ceil(watermark * kv_cache_manager.pool.num_blocks)

    def expected_blocks(self, request: Request) -> int:
        """Blocks that the request is expected to end with. Its last token is sampled and never computed."""
        num_tokens = len(request.prompt_token_ids) + self.lengths.num_output_tokens(request) - 1
        expected = self._kv.num_blocks_for(max(num_tokens, request.num_tokens))
        # One that was preempted may have passed its first expectation.
        return max(expected, request.num_expected_blocks)

    def fits(self, request: Request, num_new_blocks: int) -> bool:
        """Whether the request, which takes `num_new_blocks` for the tokens it has, may be expected to end.

        Blocks of lower classes count as free. An empty engine takes anybody: `Scheduler.add_request` saw to
        it that a request alone fits.
        """
        running, priority = self._running, request.priority
        if not len(running):
            return True
        to_come = self.expected_blocks(request) - self._kv.num_blocks_for(request.num_tokens)
        lacking = num_new_blocks + to_come + running.future_blocks(priority) - self._kv.num_free_blocks
        if priority is PriorityClass.BATCH:
            return lacking + self._num_kept_free <= 0
        return lacking <= 0 or (running.has_below(priority) and lacking <= running.num_blocks_below(priority))

    def num_victims(self, request: Request, num_new_blocks: int, max_num_seqs: int) -> int | None:
        """How many sequences of lower classes must give way, from the last one on, so that `request` finds a
        place and `num_new_blocks` free blocks; None: no number helps."""
        running, pool = self._running, self._kv.pool
        free = pool.num_free_blocks
        num_left = len(running)
        if num_new_blocks > free + (
            running.num_blocks_below(request.priority) if running.has_below(request.priority) else 0
        ):
            return None
        holders: dict[int, int] = {}
        while num_left >= max_num_seqs or num_new_blocks > free:
            if num_left == 0 or running[num_left - 1].priority <= request.priority:
                return None
            num_left -= 1
            for block in running[num_left].block_table:
                holders[block] = left = holders.get(block, pool.ref_cnt(block)) - 1
                free += left == 0
        return len(running) - num_left

    def on_allocated(self, request: Request, num_blocks: int) -> None:
        """Books `num_blocks` that a running request was just given."""
        num_held = len(request.block_table)
        if num_held > request.num_expected_blocks:
            num_tokens = len(request.prompt_token_ids) + self.lengths.on_passed(request) - 1
            self._running.expect(request, max(num_held, self._kv.num_blocks_for(num_tokens)))
        self._running.on_allocated(request, num_blocks)
