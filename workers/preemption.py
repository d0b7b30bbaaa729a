"""What a preempted request's KV is worth: copied to host memory and back, or computed again."""

from dataclasses import dataclass

# Of a prompt, until one was measured: slow enough that a first victim's work is kept if that is possible.
_FIRST_PREFILL_TOKENS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Bytes of a block over all layers, and the speed of a copy, one way."""

    bytes_per_block: int
    bytes_per_s: float

    def swaps(self, num_tokens: int, num_blocks: int, prefill_tokens_per_s: float) -> bool:
        """Whether copying `num_blocks` out and in is faster than to compute `num_tokens` again.

        `prefill_tokens_per_s` as measured, 0 if nothing was yet.
        """
        swap_s = 2 * num_blocks * self.bytes_per_block / self.bytes_per_s
        recompute_s = num_tokens / (prefill_tokens_per_s or _FIRST_PREFILL_TOKENS_PER_S)
        return swap_s < recompute_s
