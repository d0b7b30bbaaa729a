"""Deterministic mode: every token is computed by operations whose shapes only its own position gives.

So logits are equal bit for bit whatever else is in the batch, in which chunks a prompt came, what ran before,
and on how many ranks (on one kind of machine with one number of threads in each rank).
"""

from bisect import bisect_left, bisect_right

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from workers.model_step import ModelStep
from workers.models.decoder import Decoder
from workers.models.layers import Attention, KVCache, Linear, TokenwiseAttention

# Every matrix product is computed at one shape, with this many rows (padded). In fp32 on a Xeon with 2
# threads 16 rows take 1.1 ms a layer and 1 row 0.6.
TILE_ROWS = 16
# The output matrix is most of a small model: 34 ms for 4 rows, 49 for 16, and most steps sample few rows.
LOGIT_TILE_ROWS = 4


class ExactForward:
    """A model computed in tiles of rows."""

    def __init__(self, model: Decoder) -> None:
        """Raises RuntimeError when the machine's matrix library computes equal rows differently."""
        self.model = model
        _check_row_invariance(model.linears, TILE_ROWS)
        _check_row_invariance(model.lm_head[:1], LOGIT_TILE_ROWS)

    def compute_logits(self, step: ModelStep, cache: KVCache) -> Tensor:
        """Stores the KV of all tokens; fp32 logits of the rows that sample.

        Tokens of a sequence are in order, so what a token attends to was stored by an earlier tile or, layer
        by layer, in its own.
        """
        num_tokens = len(step.token_ids)
        hidden = torch.empty(num_tokens, self.model.config.hidden_size)
        for start in range(0, num_tokens, TILE_ROWS):
            tile = slice(start, min(start + TILE_ROWS, num_tokens))
            attention = self._tile_attention(step, cache, tile.start, tile.stop)
            padded = self.model.forward(
                _pad(step.token_ids[tile], TILE_ROWS), _pad(step.positions[tile], TILE_ROWS), attention
            )
            hidden[tile] = padded[: tile.stop - tile.start]
        sampled = hidden[step.sampled_rows]
        logits = torch.empty(len(sampled), self.model.vocab_size)
        for start in range(0, len(sampled), LOGIT_TILE_ROWS):
            rows = sampled[start : start + LOGIT_TILE_ROWS]
            padded = self.model.compute_logits(_pad(rows, LOGIT_TILE_ROWS))
            logits[start : start + len(rows)] = padded[: len(rows)]
        return logits

    def _tile_attention(self, step: ModelStep, cache: KVCache, start: int, end: int) -> Attention:
        """Attention for rows start … end - 1 of a step: the sequences cut to what lies in there."""
        first = bisect_right(step.query_start_loc, start) - 1
        last = bisect_left(step.query_start_loc, end)
        ends = step.query_start_loc[first + 1 : last + 1]
        tables = [torch.tensor(table) for table in step.block_tables[first:last]]
        return TokenwiseAttention(
            cache,
            self.model.sharding.attention_pieces,
            slot_mapping=step.slot_mapping[start:end],
            block_tables=pad_sequence(tables, batch_first=True),
            seq_lens=torch.tensor(step.seq_lens[first:last]) - (torch.tensor(ends) - end).clamp(min=0),
            query_start_loc=torch.tensor([0, *(min(each, end) - start for each in ends)]),
        )


def _pad(rows: Tensor, num_rows: int) -> Tensor:
    """rows and zeros, [num_rows, ...]."""
    padded = rows.new_zeros(num_rows, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def _check_row_invariance(linears: list[Linear], num_rows: int) -> None:
    """Raises RuntimeError if equal rows give unequal results: then places in a tile would matter."""
    generator = torch.Generator().manual_seed(0)
    for linear in linears:
        row = torch.randn(linear.in_features, generator=generator)
        rows = linear(row.repeat(num_rows, 1))
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            raise RuntimeError(
                f"deterministic mode: this machine's matrix library computes equal rows differently for "
                f"a matrix of {linear.out_features} x {linear.in_features}"
            )
