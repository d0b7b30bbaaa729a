"""What the engine says about itself in heartbeats and metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from workers.batch import PreemptionMode, PreemptionReason, SchedulerOutput

_WEIGHT = 0.1  # of a new step in the running means: they forget in some tens of steps


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One consistent look, taken by the engine thread between two steps.

    `read_offsets` are the mailbox offsets, by class, up to which dispatches are in these figures. By class,
    too, are `num_waiting`, `uncomputed_tokens` of all that run and wait, and `own_blocks` of those that run:
    what they did not find cached. Counters
    since the start are `num_preemptions`, by reason and mode in `preemptions`, and `prefix_cache_queries` and
    `prefix_cache_hits`, in tokens. `kv_fragmentation` is the share of the slots in held blocks that hold no
    token, 0 … 1. `predicted_step_ms` was predicted for the step that ended last. `prefix_keys` name what the
    prefix cache held within the last second; None without one.
    """

    num_running: int = 0
    num_running_by_class: tuple[int, ...] = (0, 0, 0)
    num_waiting: tuple[int, ...] = (0, 0, 0)
    num_blocks: int = 0
    free_blocks: int = 0
    own_blocks: tuple[int, ...] = (0, 0, 0)
    num_host_blocks: int = 0
    free_host_blocks: int = 0
    kv_fragmentation: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    uncomputed_tokens: tuple[int, ...] = (0, 0, 0)
    num_preemptions: int = 0
    preemptions: Mapping[tuple[PreemptionReason, PreemptionMode], int] = field(default_factory=dict)
    step_time_ms: float = 0.0
    predicted_step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    read_offsets: tuple[int, ...] = (0, 0, 0)
    prefix_keys: tuple[int, ...] | None = None


@dataclass(slots=True)
class StepMeter:
    """Running means over steps. A rate counts only the steps of its kind: with prompt chunks, or without."""

    step_s: float = field(default=0.0, init=False)
    prefill_tokens_per_s: float = field(default=0.0, init=False)
    decode_tokens_per_s: float = field(default=0.0, init=False)

    def add(self, batch: SchedulerOutput, seconds: float) -> None:
        seconds = max(seconds, 1e-9)
        self.step_s = _mean(self.step_s, seconds)
        num_tokens = batch.total_num_scheduled_tokens
        num_prefill = num_tokens - len(batch.scheduled)
        if num_prefill > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, num_tokens / seconds)
        else:
            self.decode_tokens_per_s = _mean(self.decode_tokens_per_s, num_tokens / seconds)

    def add_decodes(self, num_seqs: int, seconds: Iterable[float]) -> None:
        """Steps that followed one another, each with one token of each of `num_seqs` sequences."""
        step_s, rate = self.step_s, self.decode_tokens_per_s
        for step in seconds:
            step = step if step > 1e-9 else 1e-9  # a third of max()'s time
            step_s = step if step_s == 0.0 else step_s + _WEIGHT * (step - step_s)
            rate = num_seqs / step if rate == 0.0 else rate + _WEIGHT * (num_seqs / step - rate)
        self.step_s, self.decode_tokens_per_s = step_s, rate


def _mean(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _WEIGHT * (value - mean)
