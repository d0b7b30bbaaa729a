"""Prefill's requests in the engine: what they compute is told layer by layer, and their blocks are held."""

from collections.abc import Callable
from dataclasses import dataclass

from workers.batch import SchedulerOutput
from workers.engine import Engine
from workers.handoff.kv_runner import KVRunner
from workers.handoff.source import Source
from workers.request import Request, RequestOutput, RequestStatus


@dataclass(slots=True, eq=False)
class _Prompt:
    source: Source
    request: Request
    is_lost: bool = False


class PrefillBlocks:
    """A `workers.batch.StepWatcher`; all of it in the engine's thread.

    `on_first` (transfer) is called when the first KV of a transfer is there, `on_lost` (transfer, why) when
    it will not be whole. They must not wait.
    """

    def __init__(
        self,
        engine: Engine,
        runner: KVRunner,
        on_first: Callable[[bytes], None],
        on_lost: Callable[[bytes, str], None],
    ) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._runner = runner
        self._num_layers = runner.kv_layout.num_layers
        self._on_first = on_first
        self._on_lost = on_lost
        self._prompts: dict[Request, _Prompt] = {}
        self._by_transfer: dict[bytes, _Prompt] = {}
        self._step: list[tuple[Source, range]] = []
        self._num_told = 0

    def begin(self, source: Source, request: Request) -> list[RequestOutput]:
        """The prompt is to be computed, and one token sampled."""
        prompt = _Prompt(source, request)
        self._prompts[request] = self._by_transfer[source.transfer_id] = prompt
        outputs = self._engine.add_request(request)
        if not request.arrival:  # as old an attempt as one that is here
            self._on_lost(source.transfer_id, "known_attempt")
        return outputs

    def stop(self, transfer_id: bytes) -> list[RequestOutput]:
        """Nothing more of it is computed; its blocks stay."""
        prompt = self._by_transfer.get(transfer_id)
        if prompt is None or not prompt.request.arrival or prompt.request.status is RequestStatus.FINISHED:
            return []
        return self._engine.abort(prompt.request.request_id, prompt.request.attempt)

    def release(self, transfer_id: bytes) -> list[RequestOutput]:
        """Nobody reads its blocks any more."""
        if (prompt := self._by_transfer.pop(transfer_id, None)) is not None:
            del self._prompts[prompt.request]
            self._pool.free(reversed(prompt.source.block_ids))
        return []

    def before(self, batch: SchedulerOutput) -> None:
        """Holds the blocks that the step writes to: they must not be another's while the writer reads."""
        self._step.clear()
        if not self._prompts:
            return
        for event in batch.preempted:
            self._lose(event.victim)
        for sequence in batch.scheduled:
            request = sequence.request
            prompt = self._prompts.get(request)
            if prompt is None or prompt.is_lost:
                continue
            source, start = prompt.source, request.num_computed_tokens
            is_begun = bool(source.block_ids)
            new = request.block_table[len(source.block_ids) :]
            self._pool.share(new)
            source.block_ids += new
            if start and not is_begun:  # what the prefix cache had
                self._tell(source, range(start), range(self._num_layers))
            self._step.append((source, range(start, start + sequence.num_scheduled_tokens)))
        if self._step:
            self._num_told = 0
            self._runner.watch_layers(self._on_stored)

    def after(self, batch: SchedulerOutput) -> None:
        """All layers are there."""
        if not self._step:
            return
        self._runner.watch_layers(None)
        if self._num_told < self._num_layers:
            for source, tokens in self._step:
                self._tell(source, tokens, range(self._num_told, self._num_layers))
        self._step.clear()

    def _on_stored(self, layer: int) -> None:
        for source, tokens in self._step:
            self._tell(source, tokens, range(self._num_told, layer + 1))
        self._num_told = layer + 1

    def _tell(self, source: Source, tokens: range, layers: range) -> None:
        if source.stored(tokens, layers):
            self._on_first(source.transfer_id)

    def _lose(self, request: Request) -> None:
        """It would be computed again in other blocks, while decode has what these held."""
        prompt = self._prompts.get(request)
        if prompt is not None and not prompt.is_lost:
            prompt.is_lost = True
            self._on_lost(prompt.source.transfer_id, "preempted")
