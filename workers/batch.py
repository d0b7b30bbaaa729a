"""What the scheduler hands to a model runner for one step, and what comes back."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from schemas.sampling import TokenLogprobs
from workers.request import Request


@dataclass(slots=True)
class ScheduledSequence:
    """`num_scheduled_tokens` tokens of `request`, from `request.num_computed_tokens` on.

    `samples` is true when these tokens reach the end of what is known, so a next token is sampled.
    """

    request: Request
    num_scheduled_tokens: int
    samples: bool


class PreemptionMode(StrEnum):
    """What becomes of the victim's KV: thrown away, or copied to host memory."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


class PreemptionReason(StrEnum):
    """NO_FREE_BLOCK: a running sequence needs its next block. HIGHER_CLASS_…: a waiting request of a higher
    class needs blocks, or a place among `max_num_seqs`."""

    NO_FREE_BLOCK = "no_free_block"
    HIGHER_CLASS_BLOCKS = "higher_class_blocks"
    HIGHER_CLASS_SEQS = "higher_class_seqs"


@dataclass(frozen=True, slots=True)
class Preempted:
    """`num_tokens_lost` computed tokens of `victim` must be computed again; `for_request` got its room."""

    victim: Request
    reason: PreemptionReason
    mode: PreemptionMode
    num_tokens_lost: int
    for_request: Request


@dataclass(slots=True)
class SchedulerOutput:
    """One step: decodes first, then prompt chunks.

    `preempted` lost their blocks in this step; `admitted` left the waiting queue in it. Before anything is
    computed the runner copies whole blocks over all layers: first `swap_out`, pairs (device block, host
    block), then `swap_in`, pairs (host block, device block).

    `num_sampled` sequences sample a token. `num_context_tokens` is the sum of the sequences' lengths with
    this step's tokens, `num_attended_pairs` is of its prompt chunks (step_time.py), `predicted_s` how long
    the step is thought to take.
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    total_num_scheduled_tokens: int = 0
    num_sampled: int = 0
    num_context_tokens: int = 0
    num_attended_pairs: int = 0
    predicted_s: float = 0.0


@dataclass(slots=True)
class RunnerOutput:
    """One entry per scheduled sequence: the sampled id, or None where none was due.

    `logprobs` is empty if no sequence asked for them, else it has an entry per sequence, or None.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class ModelRunner(Protocol):
    """Executes steps. Owns weights and KV memory, knows nothing of queues."""

    @property
    def bytes_per_block(self) -> int:
        """KV bytes that one block takes over all layers."""

    @property
    def swap_bytes_per_s(self) -> float:
        """How fast blocks are copied between device and host memory, one way. Valid after the allocation."""

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates the pools once; block ids are 0 … num_blocks - 1 and 0 … num_host_blocks - 1."""

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        """Copies the blocks that are swapped, then runs the batch if there is one."""


class StepWatcher(Protocol):
    """Who must see each step: on workers with a role, who hands KV over. In the engine's thread."""

    def before(self, batch: SchedulerOutput) -> None:
        """Planned, and not executed."""

    def after(self, batch: SchedulerOutput) -> None:
        """Executed, if there was anything to execute, and not booked."""
