"""A step as tensors on a device: packed into one buffer on the host, so that one copy brings all of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.model_step import ModelStep

# Elements of int32: a part that begins at a multiple of 16 bytes is what kernels are compiled for.
_ALIGNED = 4
# Widths of block tables are powers of two from here on, so that kernels see few of them.
_LEAST_WIDTH = 16
_NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step. `table_width`: blocks of a row of the block tables."""

    num_tokens: int
    num_seqs: int
    table_width: int
    num_sampled: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the parts of a `DeviceStep`, in order."""
        tokens, seqs = self.num_tokens, self.num_seqs
        return tokens, tokens, tokens, seqs, seqs + 1, self.num_sampled, seqs * self.table_width

    @property
    def offsets(self) -> list[int]:
        """Where each part begins, and the end."""
        found = [0]
        for size in self.sizes:
            found.append(-(-(found[-1] + size) // _ALIGNED) * _ALIGNED)
        return found


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """As `ModelStep`, in int32, what kernels take. A row of padding has the slot -1, a sequence of padding
    the length 0: its KV is stored nowhere and it attends to nothing."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens]
    seq_lens: Tensor  # [num_seqs]
    query_start_loc: Tensor  # [num_seqs + 1]
    sampled_rows: Tensor  # [num_sampled]
    block_tables: Tensor  # [num_seqs, table_width], entries past a sequence's end are of no meaning


def step_shape(step: ModelStep) -> StepShape:
    """Of the step as it is."""
    longest = max(map(len, step.block_tables))
    return StepShape(len(step.token_ids), len(step.seq_lens), table_width(longest), len(step.sampled_rows))


def decode_shape(step: ModelStep, num_rows: int) -> StepShape:
    """Of a step of decodes filled up to `num_rows` sequences, of which all have logits."""
    return StepShape(num_rows, num_rows, table_width(max(map(len, step.block_tables))), num_rows)


def table_width(num_blocks: int) -> int:
    """Of tables with so many blocks in a row, or up to twice as many."""
    return max(_LEAST_WIDTH, 1 << (num_blocks - 1).bit_length())


def is_decode(step: ModelStep) -> bool:
    """Whether each sequence has one new token."""
    return len(step.token_ids) == len(step.seq_lens)


def pack(step: ModelStep, shape: StepShape, *, pin_memory: bool = False) -> Tensor:
    """int32 of `shape.offsets[-1]` elements on the host; `unpack` says what lies where.

    Pinned memory comes from torch's cache, which gives none out anew before copies from it are over.
    """
    flat = torch.empty(shape.offsets[-1], dtype=torch.int32, pin_memory=pin_memory)
    parts = [flat.numpy()[at : at + size] for at, size in zip(shape.offsets, shape.sizes, strict=False)]
    token_ids, positions, slots, seq_lens, starts, sampled, tables = parts
    _fill(token_ids, step.token_ids.numpy(), 0)
    _fill(positions, step.positions.numpy(), 0)
    _fill(slots, step.slot_mapping.numpy(), _NO_SLOT)
    _fill(seq_lens, step.seq_lens, 0)
    num_seqs = len(step.seq_lens)
    starts[: num_seqs + 1] = step.query_start_loc
    # Each sequence of padding has a row of padding.
    starts[num_seqs + 1 :] = starts[num_seqs] + np.arange(1, shape.num_seqs - num_seqs + 1)
    if shape.num_sampled == len(step.sampled_rows):
        sampled[:] = step.sampled_rows.numpy()
    else:
        sampled[:] = np.arange(shape.num_sampled)
    rows = tables.reshape(shape.num_seqs, shape.table_width)
    rows[:] = 0
    for row, table in zip(rows, step.block_tables, strict=False):
        row[: len(table)] = table
    return flat


def _fill(part: npt.NDArray[np.int32], values: Sequence[int] | npt.NDArray[np.int64], padding: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding


def unpack(flat: Tensor, shape: StepShape) -> DeviceStep:
    """Views of a buffer that `pack` made, wherever it was copied to."""
    parts = [flat[at : at + size] for at, size in zip(shape.offsets, shape.sizes, strict=False)]
    token_ids, positions, slot_mapping, seq_lens, query_start_loc, sampled_rows, tables = parts
    return DeviceStep(
        token_ids,
        positions,
        slot_mapping,
        seq_lens,
        query_start_loc,
        sampled_rows,
        tables.view(shape.num_seqs, shape.table_width),
    )
