"""Decode's blocks for KV that comes from elsewhere, and how a request with such KV enters the engine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from schemas.records import Handoff
from workers.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from workers.block_pool import BlockPool
from workers.canary import NO_CANARY
from workers.engine import Engine
from workers.request import Request, RequestOutput


@dataclass(slots=True, eq=False)
class _Place:
    """`block_ids`: those of all its tokens, the first `num_cached` shared with whoever has the prefix.
    `is_doubted`: what they hold was maybe computed wrong; `is_vouched`: what was written to them was not."""

    request: Request
    block_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    is_doubted: bool = False
    is_vouched: bool = False

    def holds(self, pool: BlockPool) -> set[int]:
        """Of the blocks that were written for it, those that hold the same still."""
        request = self.request
        found = set()
        for index, block in enumerate(self.block_ids[self.num_cached :], self.num_cached):
            is_its = request.block_table[index : index + 1] == [block]
            known = pool.hash_of(block)
            if is_its or (known is not None and request.block_hashes[index : index + 1] == [known]):
                found.add(block)
        return found


class DecodeBlocks:
    """A `workers.batch.StepWatcher`; all of it in the engine's thread.

    `on_room` (transfer, blocks behind the cached tokens, cached tokens) is called when a place was found,
    `on_no_room` (transfer, why) when none will be; `on_doubted` (request) for one that runs on KV which was
    maybe computed wrong. They must not wait.
    """

    def __init__(
        self,
        engine: Engine,
        on_room: Callable[[bytes, list[int], int], None],
        on_no_room: Callable[[bytes, str], None],
        on_doubted: Callable[[Request], None],
    ) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._kv = engine.kv_cache_manager
        self._on_room = on_room
        self._on_no_room = on_no_room
        self._on_doubted = on_doubted
        self._places: dict[bytes, _Place] = {}
        self._waiting: dict[bytes, Request] = {}
        self._adopted: dict[bytes, _Place] = {}  # which nobody has vouched for

    def reserve(self, transfer_id: bytes, request: Request) -> list[RequestOutput]:
        """Blocks for all tokens of the request, which is not in the engine: now, or when there are some."""
        self._scheduler.limit_output(request)
        longest = self._kv.num_blocks_for(request.num_kv_tokens_at_most)
        if not request.prompt_token_ids or len(request.output_token_ids) >= request.max_output_tokens:
            self._on_no_room(transfer_id, "nothing_to_decode")
        elif longest > self._kv.pool.num_blocks:
            self._on_no_room(transfer_id, "too_long")
        elif not self._find(transfer_id, request):
            self._waiting[transfer_id] = request
        return []

    def release(self, transfer_id: bytes) -> list[RequestOutput]:
        """Nothing is written to its blocks any more, or it waits for none. Doing it twice does nothing."""
        self._waiting.pop(transfer_id, None)
        if (place := self._places.pop(transfer_id, None)) is not None:
            self._kv.pool.free(reversed(place.block_ids))
        return []

    def adopt(self, transfer_id: bytes, handoff: Handoff) -> list[RequestOutput]:
        """The request runs from here, as if the step that sampled its first token had been computed here."""
        place = self._places.pop(transfer_id)
        request, kv = place.request, self._kv
        if place.is_doubted:
            kv.pool.free(reversed(place.block_ids))
            return self._engine.add_request(request)
        if not place.is_vouched and handoff.canary != NO_CANARY:
            # The request's own table grows, and is emptied in the end.
            self._adopted[transfer_id] = replace(place, block_ids=list(place.block_ids))
        first = handoff.first_token_id
        # A place in the batch is for one that has its first token.
        request.output_token_ids.append(first)
        is_adopted = self._scheduler.adopt(request, place.block_ids)
        request.output_token_ids.pop()
        if is_adopted:
            request.num_cached_tokens = min(handoff.num_cached_tokens, len(request.prompt_token_ids))
            request.num_computed_tokens -= 1
            step = SchedulerOutput([ScheduledSequence(request, 1, True)])
            sampled = RunnerOutput([first], [handoff.first_token_logprobs])
            return self._scheduler.update_from_output(step, sampled)
        # All places are taken: it waits for one as others do, and finds its KV in the prefix cache then.
        request.block_table, request.num_computed_tokens = place.block_ids, request.num_tokens
        kv.cache_computed(request)
        kv.free(request)
        request.num_computed_tokens = 0
        return self._engine.add_request(request)

    def vouch(self, transfer_ids: Iterable[bytes]) -> list[RequestOutput]:
        """What was adopted by these was computed right."""
        for transfer_id in transfer_ids:
            self._adopted.pop(transfer_id, None)
            if (place := self._places.get(transfer_id)) is not None:
                place.is_vouched = True
        return []

    def doubt(self, transfer_ids: Iterable[bytes]) -> list[RequestOutput]:
        """What came, or is to come, by these was maybe computed wrong. All that runs on it is told of, what
        waits to is computed here, and nobody finds any of it in the cache, or what was computed behind it."""
        wrong: set[int] = set()
        told: set[Request] = set()
        for transfer_id in transfer_ids:
            if (adopted := self._adopted.pop(transfer_id, None)) is not None:
                wrong |= adopted.holds(self._kv.pool)
                told.add(adopted.request)
            elif (place := self._places.get(transfer_id)) is not None:
                place.is_doubted = True
        for place in self._places.values():
            if not wrong.isdisjoint(place.block_ids[: place.num_cached]):
                place.is_doubted = True
        hashes = {self._kv.pool.hash_of(block) for block in wrong} - {None}
        for request in self._scheduler.requests:
            # One that had to give way has no blocks now, and may have had these.
            had = request.block_hashes if request.num_preemptions and not request.block_table else []
            if not (wrong.isdisjoint(request.block_table) and hashes.isdisjoint(had)):
                told.add(request)
        if told:
            self._kv.pool.forget_cached()
        for request in told:
            self._on_doubted(request)
        return []

    def before(self, batch: SchedulerOutput) -> None:
        """Blocks that the step swaps out are to be read yet: nobody may be told of them."""

    def after(self, batch: SchedulerOutput) -> None:
        for transfer_id, request in sorted(self._waiting.items(), key=lambda each: each[1].priority):
            if self._find(transfer_id, request):
                del self._waiting[transfer_id]

    def _find(self, transfer_id: bytes, request: Request) -> bool:
        """True once it is answered."""
        kv, scheduler = self._kv, self._scheduler
        num_new = kv.num_new_blocks_for(request, request.num_tokens)
        if num_new > kv.num_free_blocks or not scheduler.budget.fits(request, num_new):
            # The scheduler has lower classes give way for requests that it starts itself.
            if scheduler.running.has_below(request.priority):
                self._on_no_room(transfer_id, "blocks_of_lower_classes")
                return True
            return False
        num_cached = kv.take_cached(request)
        allocated = kv.allocate_slots(request, request.num_tokens - num_cached)
        assert allocated
        block_ids, request.block_table = request.block_table, []
        request.num_computed_tokens = request.num_registered_blocks = 0
        self._places[transfer_id] = _Place(request, block_ids, num_cached // kv.block_size)
        self._on_room(transfer_id, block_ids[num_cached // kv.block_size :], num_cached)
        return True
