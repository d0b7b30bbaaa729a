"""Decode's blocks for KV that comes from elsewhere, and how a request with such KV enters the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.records import Handoff
from workers.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from workers.engine import Engine
from workers.request import Request, RequestOutput


@dataclass(slots=True, eq=False)
class _Place:
    """`block_ids`: those of all its tokens, the first ones shared with whoever has the prefix."""

    request: Request
    block_ids: list[int] = field(default_factory=list)


class DecodeBlocks:
    """A `workers.batch.StepWatcher`; all of it in the engine's thread.

    `on_room` (transfer, blocks behind the cached tokens, cached tokens) is called when a place was found,
    `on_no_room` (transfer, why) when none will be. They must not wait.
    """

    def __init__(
        self,
        engine: Engine,
        on_room: Callable[[bytes, list[int], int], None],
        on_no_room: Callable[[bytes, str], None],
    ) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._kv = engine.kv_cache_manager
        self._on_room = on_room
        self._on_no_room = on_no_room
        self._places: dict[bytes, _Place] = {}
        self._waiting: dict[bytes, Request] = {}

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
        self._places[transfer_id] = _Place(request, block_ids)
        self._on_room(transfer_id, block_ids[num_cached // kv.block_size :], num_cached)
        return True
