"""A worker known by what it told of itself, where nobody says which GPUs it has. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from workers.roofline import StepLoad


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """A step takes `step_s` and `seq_s` for each sequence, or as long as its tokens do at
    `prefill_tokens_per_s` (0: not known) if it has prompt chunks and that is longer. Nothing is swapped.
    """

    num_blocks: int
    step_s: float
    seq_s: float
    prefill_tokens_per_s: float

    @property
    def bytes_per_block(self) -> int:
        return 1

    @property
    def swap_bytes_per_s(self) -> float:
        return 1.0

    def step_seconds(self, load: StepLoad) -> float:
        seconds = self.step_s + self.seq_s * load.num_sampled
        if load.num_tokens > load.num_sampled and self.prefill_tokens_per_s:
            return max(seconds, load.num_tokens / self.prefill_tokens_per_s)
        return seconds

    def decode_seconds(self, num_seqs: int) -> Callable[[int], float]:
        seconds = self.step_s + self.seq_s * num_seqs
        return lambda context_tokens: seconds

    def swap_seconds(self, num_blocks: int) -> float:
        return 0.0
