"""What a model runner has to offer to a worker that hands KV over."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from schemas.kv_layout import KVLayout
from workers.handoff.kv_pool import Bytes, KVPool
from workers.handoff.layout import RankPool


@runtime_checkable
class KVRunner(Protocol):
    """A `workers.batch.ModelRunner` of one rank, whose KV lies in memory that others can write to."""

    @property
    def kv_layout(self) -> KVLayout:
        """How its pools lie in memory."""

    def kv_memory(self) -> tuple[Bytes, Bytes]:
        """Keys and values, as bytes in one piece, in the pools' own memory. After the allocation."""

    def watch_layers(self, on_stored: Callable[[int], None] | None) -> None:
        """In the steps to come, `on_stored` is told of each layer when the KV of all of the step's tokens is
        there, if the runner computes it so; what was not told is there when the step is over."""


def kv_pool_of(runner: object, num_blocks: int) -> tuple[KVRunner, KVPool]:
    """The runner as one that hands over, and its pool. Raises ValueError for one that cannot."""
    if not isinstance(runner, KVRunner):
        raise ValueError(f"a {type(runner).__name__} has no KV that could be handed over")
    keys, values = runner.kv_memory()
    return runner, KVPool.of(RankPool(runner.kv_layout, 0, num_blocks), keys, values)
