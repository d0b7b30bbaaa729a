"""`kernels.logit_edits` in plain torch: each returns a copy of fp32 logits [num_rows, vocab_size]."""

import torch
from torch import Tensor


def add_bias_ref(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> Tensor:
    """As `add_bias`."""
    return logits.index_put((rows, token_ids), biases.float(), accumulate=True)


def apply_penalties_ref(
    logits: Tensor,
    rows: Tensor,
    offsets: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """As `apply_penalties`."""
    edited = logits.double()
    for i, row in enumerate(rows.tolist()):
        mine = slice(int(offsets[i]), int(offsets[i + 1]))
        ids, count = token_ids[mine].long(), counts[mine]
        values = edited[row, ids]
        values = torch.where(values > 0, values / repetition[i], values * repetition[i])
        edited[row, ids] = values - frequency[i] * count - presence[i] * (count > 0)
    return edited.float()


def apply_bitmask_ref(logits: Tensor, rows: Tensor, bitmask: Tensor) -> Tensor:
    """As `apply_bitmask`."""
    edited = logits.clone()
    allowed = (bitmask.unsqueeze(-1) >> torch.arange(32)) & 1
    forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
    edited[rows] = edited[rows].masked_fill(forbidden, -torch.inf)
    return edited
