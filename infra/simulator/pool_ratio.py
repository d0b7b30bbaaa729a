"""How many workers of a fleet should compute prompts, and how many decode. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens a second: of prompts that come, of output that they lead to; and what one worker computes, and
    what one decodes at a batch that meets the inter-token target."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float

    def use(self, num_prefill: int, num_decode: int) -> float:
        """Of the busier pool: 1 is all that it can do."""
        prefill = self.prompt_tokens_per_s / (num_prefill * self.prefill_tokens_per_s)
        decode = self.output_tokens_per_s / (num_decode * self.decode_tokens_per_s)
        return max(prefill, decode)


def pool_ratio(demand: Demand, num_workers: int) -> tuple[int, int]:
    """(prefill, decode) workers with the least use of the busier pool. Raises ValueError for fewer than 2."""
    if num_workers < 2:
        raise ValueError(f"two pools need 2 workers, there are {num_workers}")
    splits = ((n, num_workers - n) for n in range(1, num_workers))
    return min(splits, key=lambda split: demand.use(*split))
