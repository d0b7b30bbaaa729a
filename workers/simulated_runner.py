"""A model runner without a model: step times of a GPU, or any; tokens that anyone can compute beforehand."""

import time
from collections.abc import Callable, Set

import numpy as np

from schemas.kv_layout import KVLayout
from schemas.sampling import TokenLogprobs
from workers.batch import RunnerOutput, SchedulerOutput
from workers.handoff.kv_pool import Bytes
from workers.request import Request
from workers.roofline import StepCosts, StepLoad
from workers.simulated_kv import LAYOUT, SimulatedKV

_MASK = (1 << 64) - 1
# Of no GPU in particular.
_KV_BYTES = 512 << 20
_BYTES_PER_BLOCK = 16 * 1024
_SWAP_BYTES_PER_S = 50e9


class SimulatedRunner:
    """With a `roofline`, a step takes as long as it says for the batch and the blocks that are swapped,
    divided by `speed`; without one, `step_ms` whatever the batch. 0 of either is as fast as it can.

    The token at an output position is a function of (request_id, position) alone, in
    [first_token_id, vocab_size) and never one of `eos_token_ids`, so a sequence ends by its length. Under a
    grammar it is one of all that the grammar allows, end tokens among them, by the same function. Each token
    is said to be certain: log probability 0.

    Steps that follow one another keep their cadence: what the engine spends between two of them comes off
    the second one's sleep, as long as it is less than half of it. A longer pause means the engine was idle.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        first_token_id: int = 0,
        eos_token_ids: Set[int] = frozenset(),
        mask_size: int | None = None,
        step_ms: float = 0.0,
        roofline: StepCosts | None = None,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        hands_over: bool = False,
    ) -> None:
        """`mask_size`: tokens that a grammar's mask speaks of, the whole vocabulary; default vocab_size.
        `hands_over`: it has KV, of a few bytes a token, that workers can give one another.

        Raises ValueError when no token is left to emit, a time or speed is negative, or both are given."""
        if step_ms < 0:
            raise ValueError(f"step_ms must not be negative, got {step_ms}")
        if not 0 <= speed < float("inf"):
            raise ValueError(f"speed must be 0 or more, got {speed}")
        if step_ms and roofline is not None:
            raise ValueError("step_ms and a roofline both say how long a step takes: give one")
        if not any(t not in eos_token_ids for t in range(first_token_id, vocab_size)):
            raise ValueError(f"no token id is left in [{first_token_id}, {vocab_size}) beside the end tokens")
        self._first_token_id = first_token_id
        self._num_tokens = vocab_size - first_token_id
        self._eos_token_ids = frozenset(eos_token_ids)
        self._mask = np.empty(-(-(mask_size or vocab_size) // 32), np.int32)
        self._step_s = step_ms / 1000
        self._roofline = roofline
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self._step_end = float("-inf")
        self._hands_over = hands_over
        self._kv: SimulatedKV | None = None

    @property
    def bytes_per_block(self) -> int:
        return _BYTES_PER_BLOCK if self._roofline is None else self._roofline.bytes_per_block

    @property
    def num_blocks_in_memory(self) -> int:
        """Blocks that fit what the simulated GPUs have left beside the weights."""
        return _KV_BYTES // _BYTES_PER_BLOCK if self._roofline is None else self._roofline.num_blocks

    @property
    def swap_bytes_per_s(self) -> float:
        if self._roofline is None:
            return _SWAP_BYTES_PER_S
        return self._roofline.swap_bytes_per_s * (self._speed or 1.0)

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """There is no KV to hold, but for what is handed over."""
        if self._hands_over:
            self._kv = SimulatedKV(num_blocks, num_host_blocks)

    @property
    def kv_layout(self) -> KVLayout:
        return LAYOUT

    def kv_memory(self) -> tuple[Bytes, Bytes]:
        """Of a runner that hands over, after the allocation."""
        if self._kv is None:
            raise RuntimeError("this runner was not made to hand KV over")
        return self._kv.memory()

    def watch_layers(self, on_stored: Callable[[int], None] | None) -> None:
        """A simulated step stores all layers at once, at its end."""

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        if step_s := self.step_seconds(batch):
            now = self._clock()
            began = self._step_end if now - self._step_end < step_s / 2 else now
            self._step_end = began + step_s
            if self._step_end > now:
                self._sleep(self._step_end - now)
        if self._kv is not None:
            self._kv.store(batch)
        scheduled = batch.scheduled
        tokens = [self._next_token(s.request) if s.samples else None for s in scheduled]
        if all(s.request.sampling.logprobs is None for s in scheduled):
            return RunnerOutput(tokens)
        return RunnerOutput(
            tokens, [_certain(token, s.request) for token, s in zip(tokens, scheduled, strict=True)]
        )

    def step_seconds(self, batch: SchedulerOutput) -> float:
        """How long the batch takes: first the copies of swapped blocks, then the scheduled tokens."""
        roofline = self._roofline
        if roofline is None:
            return self._step_s
        if not self._speed:
            return 0.0
        seconds = roofline.swap_seconds(len(batch.swap_out) + len(batch.swap_in))
        if batch.scheduled:
            seconds += roofline.step_seconds(_load(batch))
        return seconds / self._speed

    def token_at(self, request_id: bytes, position: int) -> int:
        """The token of a request without a grammar at an output position."""
        index = _draw(request_id, position) % self._num_tokens
        while (token_id := self._first_token_id + index) in self._eos_token_ids:
            index = (index + 1) % self._num_tokens
        return token_id

    def _next_token(self, request: Request) -> int:
        position = len(request.output_token_ids)
        if request.constraint is None:
            return self.token_at(request.request_id, position)
        request.constraint.fill_bitmask(self._mask)
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little").nonzero()[0]
        return int(allowed[_draw(request.request_id, position) % len(allowed)])


def _draw(request_id: bytes, position: int) -> int:
    """64 bits: splitmix64 (Steele et al., 2014) of both."""
    z = (int.from_bytes(request_id[:8], "little") + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _load(batch: SchedulerOutput) -> StepLoad:
    """By the sums that the scheduler has made."""
    num_tokens, num_context_tokens = batch.total_num_scheduled_tokens, batch.num_context_tokens
    # Of each sequence's first token with all that lies before it and itself.
    first_pairs = num_context_tokens - (num_tokens - len(batch.scheduled))
    pairs = batch.num_attended_pairs + first_pairs
    return StepLoad(num_tokens, batch.num_sampled, num_context_tokens, pairs)


def _certain(token_id: int | None, request: Request) -> TokenLogprobs | None:
    count = request.sampling.logprobs
    if token_id is None or count is None:
        return None
    return TokenLogprobs(0.0, [token_id][:count], [0.0][:count])
