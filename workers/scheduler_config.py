"""The limits of one engine."""

from dataclasses import dataclass

from workers.block_pool import BLOCK_SIZE

# Of CPUs: what is there to compute grows with each sequence.
DEFAULT_MAX_NUM_SEQS = 64
# Simulated on an H100 (8b) and on eight (70b), prompts of 150 tokens and answers of 500: 58 % and 28 % more
# tokens a second than with 64, and 1 % and 2 % less than with 512, whose streams are 1.4 times as slow.
MOST_UNASKED_SEQS = 256
# Prompt and answer of a sequence of which nothing is known.
_USUAL_SEQ_TOKENS = 1024

_AT_LEAST_ONE = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_chunk",
    "max_num_waiting",
)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one engine. Raises ValueError that names every bad field."""

    max_model_len: int
    """Tokens of one sequence, prompt and output together."""
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    """Sequences that hold blocks at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step. At least `max_num_seqs`, so that every decode has its place."""
    max_prefill_chunk: int = 512
    """Prompt tokens of one sequence in one step."""
    max_num_waiting: int = 1024
    """Requests that may wait here; more are refused."""
    inter_token_target_ms: float = 0.0
    """Predicted step in ms that may not be passed while an interactive sequence runs; 0: none."""
    batch_watermark: float = 0.0
    """Share of the blocks that must stay free when a request of class batch is admitted, 0 … 1."""
    hold_batch_in_prefill: bool = False
    """Batch decodes stand still in steps that carry an interactive prompt."""

    def __post_init__(self) -> None:
        errors = [
            f"{name} must be at least 1, got {getattr(self, name)}"
            for name in _AT_LEAST_ONE
            if getattr(self, name) < 1
        ]
        if self.max_num_batched_tokens < self.max_num_seqs:
            errors.append(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        # Written so that NaN fails too.
        if not 0.0 <= self.inter_token_target_ms < float("inf"):
            errors.append(f"inter_token_target_ms must be 0 or more, got {self.inter_token_target_ms}")
        if not 0.0 <= self.batch_watermark < 1.0:
            errors.append(f"batch_watermark must be at least 0 and below 1, got {self.batch_watermark}")
        if errors:
            raise ValueError("; ".join(errors))


def gpu_max_num_seqs(num_blocks: int, max_num_batched_tokens: int) -> int:
    """Sequences at once for GPUs with so many KV blocks: as many of usual length as they hold, and at most
    MOST_UNASKED_SEQS or half of a step's tokens, which leaves the other half for prompts. No fewer than
    DEFAULT_MAX_NUM_SEQS: short sequences may come, and the pool is a ceiling of its own.
    """
    held = num_blocks * BLOCK_SIZE // _USUAL_SEQ_TOKENS
    return max(DEFAULT_MAX_NUM_SEQS, min(held, MOST_UNASKED_SEQS, max_num_batched_tokens // 2))
