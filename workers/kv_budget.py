"""Who may enter the running batch, by the blocks that all in it are expected to take before they end."""

from math import ceil

from schemas.priority import PriorityClass
from workers.expected_length import ExpectedLengths
from workers.kv_cache_manager import KVCacheManager
from workers.request import Request
from workers.running_batch import RunningBatch

# Share of the pool that expectations may be wrong by before somebody must give way.
_HEADROOM = 0.02
_OWN_BITS = 32
_OWN_MASK = (1 << _OWN_BITS) - 1


class KVBudget:
    """Promises blocks and takes none: a sequence gets them as its tokens come.

    A request fits if the blocks that all are expected to hold never pass the pool, given that each that ends
    gives its own back: not all are at their longest at one time. (Gong et al., "Past-Future Scheduler for LLM
    Serving under SLA Guarantees", ASPLOS 2025.)

    What a class was promised is kept from equal and lower ones. Higher ones do not heed it: they take the
    blocks, and the lower class gives way. `watermark` is the share of the pool that class batch leaves free.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, running: RunningBatch, watermark: float) -> None:
        self.lengths = ExpectedLengths()
        self._kv = kv_cache_manager
        self._running = running
        num_blocks = kv_cache_manager.pool.num_blocks
        self._headroom = int(_HEADROOM * num_blocks)
        self._num_kept_free = ceil(watermark * num_blocks)
        # Who did not fit last, and when: nothing but an end in the batch makes room.
        self._refused: tuple[Request, int, int] | None = None

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
        running = self._running
        if not len(running):
            return True
        at = request, num_new_blocks, running.num_removed
        if self._refused == at:
            return False
        free = self._kv.num_free_blocks - num_new_blocks
        if request.priority is PriorityClass.BATCH:
            free -= self._num_kept_free
        to_come = self.expected_blocks(request) - self._kv.num_blocks_for(request.num_tokens)
        if to_come + running.future_blocks(request.priority) <= free:
            return True
        if self._stays_within(free - self._headroom, request, num_new_blocks, to_come):
            return True
        self._refused = at
        return False

    def _stays_within(self, free: int, request: Request, num_new_blocks: int, to_come: int) -> bool:
        """Whether all of this and higher classes, with `request` among them, never take more than `free`
        blocks beyond what they have now."""
        kv, priority = self._kv, request.priority
        # Blocks to come, and own blocks now, as one number: a list of those is sorted quickly.
        growing = [(to_come << _OWN_BITS) + num_new_blocks]
        for other in self._running:
            num_held = len(other.block_table)
            if other.priority > priority:
                free += num_held
                continue
            num_own = num_held - other.num_shared_blocks
            if other.num_computed_tokens < len(other.prompt_token_ids):
                # The rest of a prompt comes at once.
                rest = kv.num_blocks_for(len(other.prompt_token_ids)) - num_held
                free -= rest
                num_held += rest
                num_own += rest
            growing.append((other.num_expected_blocks - num_held << _OWN_BITS) + num_own)
        growing.sort()
        # All grow alike, a block in block_size steps: the one with the fewest to come ends first, and gives
        # back what it has now. What it gets until then is not counted for it any more.
        num_left = len(growing)
        for request_blocks in growing:
            if num_left * (request_blocks >> _OWN_BITS) > free:
                return False
            num_left -= 1
            free += request_blocks & _OWN_MASK
        return True

    def num_victims(self, request: Request, num_new_blocks: int, max_num_seqs: int) -> int | None:
        """How many sequences of lower classes must give way, from the last one on, so that `request` finds a
        place and `num_new_blocks` free blocks; None: no number helps."""
        running, pool = self._running, self._kv.pool
        free = pool.num_free_blocks
        num_left = len(running)
        num_seats = max_num_seqs - running.num_seats - request.num_seats
        if num_new_blocks > free + (
            running.num_blocks_below(request.priority) if running.has_below(request.priority) else 0
        ):
            return None
        holders: dict[int, int] = {}
        while num_seats < 0 or num_new_blocks > free:
            if num_left == 0 or running[num_left - 1].priority <= request.priority:
                return None
            num_left -= 1
            num_seats += running[num_left].num_seats
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
