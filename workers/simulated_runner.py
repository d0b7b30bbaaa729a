"""A model runner without a model: a fixed step time and tokens that anyone can compute beforehand."""

import time
from collections.abc import Callable, Set

from workers.batch import RunnerOutput, SchedulerOutput

_MASK = (1 << 64) - 1


class SimulatedRunner:
    """Takes `step_ms` a step (0: as fast as it can) whatever the batch.

    The token at an output position is a function of (request_id, position) alone, in
    [first_token_id, vocab_size) and never one of `eos_token_ids`, so a sequence ends by its length.

    Steps that follow one another keep their cadence: what the engine spends between two of them comes off
    the second one's sleep, as long as it is less than half a step. A longer pause means the engine was idle.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        first_token_id: int = 0,
        eos_token_ids: Set[int] = frozenset(),
        step_ms: float = 0.0,
        bytes_per_block: int = 16 * 1024,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises ValueError when no token is left to emit, or the step time is negative."""
        if step_ms < 0:
            raise ValueError(f"step_ms must not be negative, got {step_ms}")
        if not any(t not in eos_token_ids for t in range(first_token_id, vocab_size)):
            raise ValueError(f"no token id is left in [{first_token_id}, {vocab_size}) beside the end tokens")
        self._first_token_id = first_token_id
        self._num_tokens = vocab_size - first_token_id
        self._eos_token_ids = frozenset(eos_token_ids)
        self._step_s = step_ms / 1000
        self._bytes_per_block = bytes_per_block
        self._clock = clock
        self._sleep = sleep
        self._step_end = float("-inf")

    @property
    def bytes_per_block(self) -> int:
        return self._bytes_per_block

    @property
    def swap_bytes_per_s(self) -> float:
        return 50e9

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """There is no KV to hold."""

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        if self._step_s:
            now = self._clock()
            began = self._step_end if now - self._step_end < self._step_s / 2 else now
            self._step_end = began + self._step_s
            if self._step_end > now:
                self._sleep(self._step_end - now)
        return RunnerOutput(
            [
                self.token_at(s.request.request_id, len(s.request.output_token_ids)) if s.samples else None
                for s in batch.scheduled
            ]
        )

    def token_at(self, request_id: bytes, position: int) -> int:
        """The token of a request at an output position: splitmix64 (Steele et al., 2014) of both."""
        z = (int.from_bytes(request_id[:8], "little") + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        index = (z ^ (z >> 31)) % self._num_tokens
        while (token_id := self._first_token_id + index) in self._eos_token_ids:
            index = (index + 1) % self._num_tokens
        return token_id
