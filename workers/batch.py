"""What the scheduler hands to a model runner for one step, and what comes back."""

from dataclasses import dataclass, field
from typing import Protocol

from workers.request import Request


@dataclass(slots=True)
class ScheduledSequence:
    """`num_scheduled_tokens` tokens of `request`, from `request.num_computed_tokens` on.

    `samples` is true when these tokens reach the end of what is known, so a next token is sampled.
    """

    request: Request
    num_scheduled_tokens: int
    samples: bool


@dataclass(slots=True)
class SchedulerOutput:
    """One step: decodes first, then prompt chunks.

    `preempted` lost their blocks in this step; `admitted` left the waiting queue in it.
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    total_num_scheduled_tokens: int = 0


class ModelRunner(Protocol):
    """Executes steps. Owns weights and KV memory, knows nothing of queues."""

    @property
    def bytes_per_block(self) -> int:
        """KV bytes that one block takes over all layers."""

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates the pool once; block ids are 0 … num_blocks - 1."""

    def execute(self, batch: SchedulerOutput) -> list[int | None]:
        """Runs the batch: one entry per scheduled sequence, the sampled id, or None where none was due."""
