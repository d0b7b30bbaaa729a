"""The running batch in its order, and the blocks that its requests are still expected to take."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Set

from schemas.priority import PriorityClass
from workers.request import Request


def batch_order(request: Request) -> tuple[int, int]:
    """Its place in the batch: by class, then arrival."""
    return request.priority, request.arrival


class RunningBatch:
    """Sorted by class, then arrival: who is last gives way first.

    Each request is expected to end with `num_expected_blocks`, never fewer than it holds; what lacks is its
    future blocks. Their sums by class are kept up to date, so that admission costs nothing a sequence.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._future_blocks = [0] * len(PriorityClass)
        self._own_blocks = [0] * len(PriorityClass)
        self._num_by_class = [0] * len(PriorityClass)
        self.num_seats = 0
        """Places among max_num_seqs that are taken."""
        self.num_removed = 0
        """Requests that left so far."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    @property
    def last(self) -> Request:
        return self._requests[-1]

    def add(self, request: Request, num_expected_blocks: int) -> None:
        request.num_expected_blocks = max(num_expected_blocks, len(request.block_table))
        insort(self._requests, request, key=batch_order)
        self.num_seats += request.num_seats
        self._num_by_class[request.priority] += 1
        self._future_blocks[request.priority] += request.num_expected_blocks - len(request.block_table)
        self._own_blocks[request.priority] += len(request.block_table) - request.num_shared_blocks

    def remove(self, request: Request) -> None:
        """To be called before its blocks are freed."""
        index = bisect_left(self._requests, batch_order(request), key=batch_order)
        assert self._requests[index] is request
        del self._requests[index]
        self.num_seats -= request.num_seats
        self.num_removed += 1
        self._num_by_class[request.priority] -= 1
        self._future_blocks[request.priority] -= request.num_expected_blocks - len(request.block_table)
        self._own_blocks[request.priority] -= len(request.block_table) - request.num_shared_blocks

    def on_allocated(self, request: Request, num_blocks: int) -> None:
        """To be called when the request's table, grown by `num_blocks`, is within what was expected."""
        self._future_blocks[request.priority] -= num_blocks
        self._own_blocks[request.priority] += num_blocks

    def expect(self, request: Request, num_expected_blocks: int) -> None:
        """Changes the expectation of a running request."""
        self._future_blocks[request.priority] += num_expected_blocks - request.num_expected_blocks
        request.num_expected_blocks = num_expected_blocks

    def split(self, blocked_partitions: Set[int]) -> tuple[list[Request], list[Request]]:
        """Those that lack one token, and those that lack more; none whose reply partition is blocked."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self._requests:
            if blocked_partitions and request.reply_partition in blocked_partitions:
                continue
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            if num_tokens - request.num_computed_tokens > 1:
                prefills.append(request)
            else:
                decodes.append(request)
        return decodes, prefills

    def len_by_class(self) -> tuple[int, ...]:
        """Requests, indexed by class."""
        return tuple(self._num_by_class)

    def own_blocks_by_class(self) -> tuple[int, ...]:
        """Blocks that requests hold beyond those that they found cached, indexed by class."""
        return tuple(self._own_blocks)

    def future_blocks(self, priority: PriorityClass) -> int:
        """Blocks that requests of this class and of higher ones are still expected to take."""
        return sum(self._future_blocks[: priority + 1])

    def has_below(self, priority: PriorityClass) -> bool:
        """Whether a request of a lower class runs, that would give way to one of this class."""
        return bool(self._requests) and self._requests[-1].priority > priority

    def num_blocks_below(self, priority: PriorityClass) -> int:
        """Blocks that requests of lower classes hold; one that several share counts several times."""
        start = bisect_left(self._requests, (priority + 1, 0), key=batch_order)
        return sum(len(r.block_table) for r in self._requests[start:])
