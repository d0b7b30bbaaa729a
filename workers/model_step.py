"""The tokens of one step as arrays: what a model computes, and where their KV goes.

For decodes all of it is plain integers, about 2 µs a sequence.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.batch import ScheduledSequence
from workers.block_pool import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class ModelStep:
    """The scheduled tokens of a batch, one after another. Tensors are int64."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens]
    block_tables: list[list[int]]  # of each sequence, up to its last token
    seq_lens: list[int]  # with this step's tokens
    query_start_loc: list[int]  # [num_seqs + 1]
    sampled_rows: Tensor  # the last row of each sequence that samples


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may name: token ids below `vocab_size`, blocks below `num_blocks`, `max_model_len` tokens
    of a sequence."""

    vocab_size: int
    num_blocks: int
    max_model_len: int


def prepare_step(scheduled: Sequence[ScheduledSequence], limits: StepLimits) -> ModelStep:
    """Raises ValueError naming the request whose tokens or blocks do not fit: kernels check nothing."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    block_tables: list[list[int]] = []
    seq_lens: list[int] = []
    query_start_loc = [0]
    sampled_rows: list[int] = []
    for sequence in scheduled:
        _check(sequence, limits.max_model_len)
        request = sequence.request
        start = request.num_computed_tokens
        end = start + sequence.num_scheduled_tokens
        table = request.block_table[: -(-end // BLOCK_SIZE)]
        if end - start == 1:
            positions.append(start)
            slots.append(table[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE)
        else:
            positions += range(start, end)
            slots += [
                table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for position in range(start, end)
            ]
        token_ids += request.tokens(start, end)
        block_tables.append(table)
        seq_lens.append(end)
        query_start_loc.append(query_start_loc[-1] + end - start)
        if sequence.samples:
            sampled_rows.append(query_start_loc[-1] - 1)
    for index, table in enumerate(block_tables):
        if max(table) >= limits.num_blocks or min(table) < 0:
            raise _error(scheduled[index], f"block_table {table} of {limits.num_blocks} blocks")
    if max(token_ids) >= limits.vocab_size or min(token_ids) < 0:
        row = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < limits.vocab_size)
        sequence = scheduled[bisect_right(query_start_loc, row) - 1]
        raise _error(sequence, f"token id {token_ids[row]} of {limits.vocab_size}")
    return ModelStep(
        token_ids=torch.from_numpy(np.array(token_ids, np.int64)),
        positions=torch.from_numpy(np.array(positions, np.int64)),
        slot_mapping=torch.from_numpy(np.array(slots, np.int64)),
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        sampled_rows=torch.from_numpy(np.array(sampled_rows, np.int64)),
    )


def _check(sequence: ScheduledSequence, max_model_len: int) -> None:
    request = sequence.request
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    end = request.num_computed_tokens + sequence.num_scheduled_tokens
    if sequence.num_scheduled_tokens < 1 or end > num_tokens:
        problem = (
            f"num_scheduled_tokens {sequence.num_scheduled_tokens} from {request.num_computed_tokens} on "
            f"with {num_tokens} tokens known"
        )
    elif end > max_model_len:
        problem = f"{end} tokens, the model takes {max_model_len}"
    elif end > len(request.block_table) * BLOCK_SIZE:
        problem = f"block_table has {len(request.block_table)} blocks for {end} tokens"
    elif sequence.samples != (end == num_tokens):
        problem = f"samples is {sequence.samples} at {end} of {num_tokens} tokens"
    else:
        return
    raise _error(sequence, problem)


def _error(sequence: ScheduledSequence, problem: str) -> ValueError:
    return ValueError(f"request {sequence.request.request_id.hex()}: {problem}")
