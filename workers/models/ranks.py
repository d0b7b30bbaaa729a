"""What the ranks of a tensor-parallel model say to each other in a step."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """All ranks call the same methods in the same order, and all get the same results.

    Methods raise RuntimeError when another rank is gone, or does not come within the group's deadline.
    """

    @property
    def size(self) -> int: ...

    def sum(self, partials: Sequence[Tensor]) -> Tensor:
        """The sum over all pieces of all ranks; `partials` are this rank's, in order, of one shape. fp32."""

    def reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' partials, in their dtype and in the library's order; may be in place."""

    def merge(self, rows: Tensor) -> Tensor:
        """The sum of fp32 `rows` of which just one rank has each, and the others zeros."""

    def concat(self, columns: Tensor) -> Tensor:
        """[num_rows, size * num_columns]: the columns of all ranks, in order."""

    def least(self, number: int) -> int:
        """The smallest number of all ranks."""


class SingleRank:
    """A model in one process."""

    size = 1

    def sum(self, partials: Sequence[Tensor]) -> Tensor:
        return sum_in_order(partials)

    def reduce(self, partial: Tensor) -> Tensor:
        return partial

    def merge(self, rows: Tensor) -> Tensor:
        return rows

    def concat(self, columns: Tensor) -> Tensor:
        return columns

    def least(self, number: int) -> int:
        return number


class DistributedRanks:
    """The ranks of torch's default process group: gloo's on CPUs, NCCL's on GPUs.

    With `exact` a sum is taken in the order of the pieces, as one rank takes it, and not in the library's.
    """

    def __init__(self, *, exact: bool) -> None:
        self.size = dist.get_world_size()
        self._exact = exact

    def sum(self, partials: Sequence[Tensor]) -> Tensor:
        if self._exact:
            return sum_in_order(self._gather(torch.stack([*partials])).flatten(0, 1).unbind())
        return self.merge(sum_in_order(partials))

    def reduce(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial)
        return partial

    def merge(self, rows: Tensor) -> Tensor:
        return self.reduce(rows)

    def concat(self, columns: Tensor) -> Tensor:
        return self._gather(columns).transpose(0, 1).flatten(1)

    def least(self, number: int) -> int:
        numbers = torch.tensor([number], device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def _gather(self, part: Tensor) -> Tensor:
        """[size, ...]"""
        parts = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        dist.all_gather_single(parts, part.contiguous())
        return parts.view(self.size, *part.shape)


def sum_in_order(partials: Sequence[Tensor]) -> Tensor:
    """fp32, from the first on."""
    first, *others = partials
    total = first.float()
    for partial in others:
        total = total + partial
    return total


def embed(token_ids: Tensor, embedding: Tensor, vocab: range, vocab_size: int, ranks: Ranks) -> Tensor:
    """fp32 [num_tokens, hidden_size]: rows of a table of which `embedding` has those of `vocab`."""
    if len(vocab) == vocab_size:
        return embedding.index_select(0, token_ids).float()
    rows = token_ids - vocab.start
    elsewhere = (rows < 0) | (rows >= len(vocab))
    embedded = embedding.index_select(0, rows.masked_fill(elsewhere, 0)).float()
    return ranks.merge(embedded.masked_fill(elsewhere.unsqueeze(1), 0))
