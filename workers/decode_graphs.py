"""Steps of decodes as CUDA graphs: hundreds of kernels are started by one call.

A graph is of one number of sequences and reads its inputs from memory of its own. A step is filled up to the
next bucket with sequences of length 0, whose KV is stored nowhere: what padding computes, nobody reads.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.device_step import DeviceStep, StepShape, decode_shape, pack, unpack
from workers.model_step import ModelStep

Compute = Callable[[DeviceStep], Tensor]


class Recorded(Protocol):
    """A computation that can be done again over what its inputs hold now."""

    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], None]], Recorded]


def decode_buckets(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8 and then every eighth number, up to `max_num_seqs` and with it: between neighbours padding
    is at most 7 rows, or as many as there are."""
    few = [count for count in (1, 2, 4) if count < max_num_seqs]
    return [*few, *range(8, max_num_seqs, 8), max_num_seqs]


class CudaGraphRecorder:
    """On the current CUDA device. All graphs share the memory that they compute in: one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> Recorded:
        # Once before, so that all kernels are compiled and libraries have their memory.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may talk to CUDA meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            compute()
        return graph


class _Bucket:
    """One graph, and the memory that it reads. It writes to `logits`."""

    def __init__(self, num_rows: int, width: int, logits: Tensor, compute: Compute, record: Recorder) -> None:
        self.num_rows = num_rows
        shape = StepShape(num_rows, num_rows, width, num_rows)
        # The tables lie apart: of their rows only what a step has is copied.
        self._tables_at = shape.offsets[-2]
        self._flat = torch.zeros(shape.offsets[-1], dtype=torch.int32, device=logits.device)
        self._logits = logits
        self.step = unpack(self._flat, shape)
        self.step.slot_mapping.fill_(-1)  # while it is recorded there is padding only
        self.step.query_start_loc.copy_(torch.arange(num_rows + 1))
        self.step.sampled_rows.copy_(torch.arange(num_rows))
        self._recorded = record(lambda: self._compute_into(compute))

    def _compute_into(self, compute: Compute) -> None:
        self._logits[: self.num_rows].copy_(compute(self.step))

    def fill(self, step: ModelStep) -> None:
        shape = decode_shape(step, self.num_rows)
        device = self._flat.device
        flat = pack(step, shape, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        self._flat[: self._tables_at].copy_(flat[: self._tables_at])
        self.step.block_tables[:, : shape.table_width].copy_(unpack(flat, shape).block_tables)

    def replay(self, step: ModelStep) -> Tensor:
        self.fill(step)
        self._recorded.replay()
        num_seqs = len(step.seq_lens)
        if len(step.sampled_rows) == num_seqs:
            return self._logits[:num_seqs]
        return self._logits.index_select(0, step.sampled_rows.to(self._flat.device))


class DecodeGraphs:
    """All that were recorded, by bucket. Replays overwrite what the one before returned."""

    def __init__(
        self,
        buckets: Sequence[int],
        table_width: int,
        vocab_size: int,
        device: torch.device,
        compute: Compute,
        record: Recorder,
    ) -> None:
        """Records them. `table_width`: blocks of the longest sequence, as of `device_step.table_width`."""
        self._sizes = sorted(set(buckets))
        logits = torch.empty(self._sizes[-1], vocab_size, device=device)
        # The largest first: smaller ones find room in the memory that it computed in.
        found = [_Bucket(size, table_width, logits, compute, record) for size in reversed(self._sizes)]
        self._buckets = found[::-1]

    def replay(self, step: ModelStep) -> Tensor | None:
        """Logits of the rows that sample; None where the step has more sequences than the largest bucket."""
        index = bisect_left(self._sizes, len(step.seq_lens))
        return self._buckets[index].replay(step) if index < len(self._sizes) else None
