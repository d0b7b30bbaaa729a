"""`kernels.token_logprobs` in plain torch."""

from torch import Tensor


def top_logprobs_ref(logits: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `top_logprobs`."""
    chosen = logits[rows].double()
    logprobs = chosen.log_softmax(-1)
    order = chosen.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return chosen.logsumexp(-1), order, logprobs.gather(-1, order)
