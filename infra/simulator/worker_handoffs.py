"""A simulated worker's side of handoffs: what it computes for others, and what it is to get from others.

All of it is done between two steps, as the engine thread does it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from infra.simulator.handoffs import Handoff, Handoffs
from infra.simulator.measures import Flight
from workers.batch import SchedulerOutput
from workers.handoff.transfer import TOLD_S
from workers.request import FinishReason, Request, RequestOutput
from workers.request_factory import make_request
from workers.scheduler import Scheduler


class WorkerHandoffs:
    """`post(call, now)` has `call` called between two steps. `take_over` is told of a request that runs here
    from its first token on, `take_whole` of one to be computed here from its prompt on, `gone` of one whose
    prompt was computed here and that goes on elsewhere."""

    def __init__(
        self,
        handoffs: Handoffs,
        scheduler: Scheduler,
        kv_bytes_per_token: float,
        last_token_id: int,
        post: Callable[[Callable[[float], None], float], None],
        take_over: Callable[[Request, Flight, float], None],
        take_whole: Callable[[Request, Flight], None],
        gone: Callable[[Request], None],
    ) -> None:
        self._handoffs = handoffs
        self._scheduler = scheduler
        self._kv_bytes = kv_bytes_per_token
        self._last_token_id = last_token_id
        self._post = post
        self._take_over, self._take_whole, self._gone = take_over, take_whole, gone
        self._computing: dict[bytes, Handoff] = {}
        self._kept: dict[bytes, Handoff] = {}
        self._ready: deque[Handoff] = deque()
        self._told_until: dict[bytes, float] = {}

    def told(self, now: float) -> list[bytes]:
        """Whose KV comes, or came of late."""
        self._told_until = {i: until for i, until in self._told_until.items() if until > now}
        return [*self._kept, *(i for i in self._told_until if i not in self._kept)]

    @property
    def num_kept(self) -> int:
        """Places kept for what is on its way."""
        return len(self._kept)

    # Prefill

    def computes(self, handoff: Handoff) -> Request:
        """The engine's request for the prompt of a handoff, which is to be computed here."""
        self._computing[handoff.request_id] = handoff
        wanted = handoff.dispatch.request
        sampling = replace(wanted.sampling, max_tokens=len(wanted.output_token_ids) + 1)
        only_prompt = replace(wanted, sampling=sampling)
        dispatch = replace(handoff.dispatch, request=only_prompt, expected_output_tokens=1)
        return make_request(dispatch, is_valid=True)

    def own_outputs(self, outputs: list[RequestOutput], now: float) -> list[RequestOutput]:
        """Those that are told here, not by another worker; an error is, wherever the request was to go."""
        own = []
        for output in outputs:
            request = output.request
            if output.finish_reason is FinishReason.ERROR:
                self.ends_here(request, now)
            if self._of(request) is not None:
                if output.finish_reason is not None:
                    self._gone(request)
            elif output.finish_reason is not FinishReason.SUPERSEDED:
                own.append(output)
        return own

    def max_tokens(self, request: Request) -> int | None:
        """Of the whole request, where only its prompt is computed here."""
        handoff = self._of(request)
        return None if handoff is None else handoff.dispatch.request.sampling.max_tokens

    def on_step(
        self, batch: SchedulerOutput, tokens: Sequence[int | None], began: float, ended: float
    ) -> None:
        """A step is over, and the scheduler not told yet: sends what it computed for others. Blocks of whole
        prompts are held on until they are let go. What ends with this very token goes nowhere."""
        pool = self._scheduler.kv_cache_manager.pool
        for sequence, token in zip(batch.scheduled, tokens, strict=True):
            request = sequence.request
            if (handoff := self._of(request)) is None:
                continue
            if token == self._last_token_id:
                self.ends_here(request, ended)
                continue
            num_computed = request.num_computed_tokens + sequence.num_scheduled_tokens
            num_bytes = max(0, num_computed - handoff.num_tokens) * self._kv_bytes
            handoff.num_tokens = max(handoff.num_tokens, num_computed)
            if sequence.samples:
                handoff.source_blocks = list(request.block_table)
                handoff.num_cached_tokens = request.num_cached_tokens
                pool.share(handoff.source_blocks)
            self._handoffs.computed(handoff, num_bytes, began, ended, last=sequence.samples)

    def ends_here(self, request: Request, now: float) -> None:
        """All that comes of the request is told here."""
        if (handoff := self._of(request)) is not None:
            del self._computing[handoff.request_id]
            if not handoff.is_over:
                self._handoffs.end(handoff, now)

    def let_go(self, handoff: Handoff, now: float) -> None:
        self._post(partial(self._let_go, handoff), now)

    def _let_go(self, handoff: Handoff, now: float) -> None:
        self._scheduler.abort(handoff.request_id, handoff.dispatch.request.attempt)
        self._scheduler.kv_cache_manager.pool.free(reversed(handoff.source_blocks))
        handoff.source_blocks = []
        if self._computing.get(handoff.request_id) is handoff:
            del self._computing[handoff.request_id]

    def _of(self, request: Request) -> Handoff | None:
        handoff = self._computing.get(request.request_id)
        return handoff if handoff and handoff.dispatch.request.attempt == request.attempt else None

    # Decode

    def keep_blocks(self, handoff: Handoff, now: float) -> None:
        self._post(partial(self._keep_blocks, handoff), now)

    def _keep_blocks(self, handoff: Handoff, now: float) -> None:
        if handoff.is_over:
            return
        wanted, kv = handoff.dispatch.request, self._scheduler.kv_cache_manager
        needed = kv.num_blocks_for(len(wanted.prompt_token_ids) + len(wanted.output_token_ids))
        if needed <= kv.num_free_blocks:
            handoff.blocks = kv.pool.allocate(needed)
            self._kept[handoff.request_id] = handoff
        self._handoffs.on_kept(handoff, now)

    def adopt(self, handoff: Handoff, now: float) -> None:
        self._ready.append(handoff)
        self._post(self.adopt_ready, now)

    def adopt_ready(self, now: float) -> None:
        """As many as find a place; the others when one is free."""
        while self._ready:
            handoff = self._ready[0]
            request = make_request(handoff.dispatch, is_valid=True)
            request.output_token_ids.append(handoff.first_token_id)
            request.num_cached_tokens = handoff.num_cached_tokens
            if not self._scheduler.adopt(request, handoff.blocks):
                return
            self._ready.popleft()
            self._forget(handoff, now)
            self._take_over(request, handoff.flight, now)

    def compute_whole(self, handoff: Handoff, now: float) -> None:
        self._post(partial(self._compute_whole, handoff), now)

    def _compute_whole(self, handoff: Handoff, now: float) -> None:
        self._give_back(handoff, now)
        self._told_until[handoff.request_id] = now + TOLD_S
        self._take_whole(make_request(handoff.dispatch, is_valid=True), handoff.flight)

    def give_back(self, handoff: Handoff, now: float) -> None:
        self._post(partial(self._give_back, handoff), now)

    def _give_back(self, handoff: Handoff, now: float) -> None:
        if self._kept.get(handoff.request_id) is handoff:
            self._forget(handoff, now)
            self._scheduler.kv_cache_manager.pool.free(reversed(handoff.blocks))

    def _forget(self, handoff: Handoff, now: float) -> None:
        del self._kept[handoff.request_id]
        self._told_until[handoff.request_id] = now + TOLD_S
