"""Picks the next tokens from logits, for all sequences of a step at once.

In this order: logit biases and what min_tokens forbids, penalties, grammar masks, temperature, top-k, top-p,
min-p. Log probabilities are those of the model's own distribution, before all of that.

Random numbers are counter-based: a pure function of (seed, position), where position is the number of output
tokens so far. So a resumed request draws what the lost run would have drawn, and a row never depends on
the rows beside it. One number a row is enough: the token is found by inverting the cumulative distribution.
"""

from collections.abc import Set
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.logit_edits import add_bias, apply_bitmask, apply_penalties
from kernels.sampling import BROKEN, sample_rows
from kernels.token_logprobs import top_logprobs
from kernels.uniform import uniform
from schemas.sampling import TokenLogprobs
from workers.request import Request
from workers.sampling_batch import Floats, Ints, SamplingBatch


class Sampled(NamedTuple):
    """By row. `logprobs` is empty if no request asked for them, else None stands for those that did not."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class _RawLogprobs(NamedTuple):
    """Of the rows that asked: their unedited logits, log normalizers [n], and the most likely [n, count]."""

    logits: Tensor
    normalizers: Floats
    top_token_ids: Ints
    top_logprobs: Floats


class Sampler:
    """Remembers the arrays of the last batch; what belongs to a request is kept in the request."""

    def __init__(self, eos_token_ids: Set[int] = frozenset()) -> None:
        """`eos_token_ids`: what may not come before min_tokens. Compiles the kernels, or loads them."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._batch = SamplingBatch([], 0, self._eos_token_ids)
        _compile()

    def sample(self, logits: Tensor, requests: list[Request]) -> Sampled:
        """One token for each row.

        logits: fp32 [num_rows, vocab_size] on the CPU, contiguous; they may be changed. -inf excludes a
        token. requests: by row, of the same vocabulary in all calls.

        Raises RuntimeError when a row has NaN or +inf, or nothing but -inf: the model's output is broken.
        """
        if len(logits) != len(requests):
            raise ValueError(f"{len(logits)} rows, {len(requests)} requests")
        if not requests:
            return Sampled([], [])
        batch = self._batch
        if batch.requests != requests:
            batch = self._batch = SamplingBatch(requests, logits.shape[1], self._eos_token_ids)
        raw = _raw_logprobs(logits, batch) if len(batch.logprob_rows) else None
        if batch.is_edited:
            _edit(logits, batch)
        tokens = sample_rows(
            logits,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            uniform(batch.seeds, batch.positions()),
        )
        broken = (tokens == BROKEN).nonzero()[0].tolist()
        if broken:
            raise broken_rows_error(broken, len(logits))
        return Sampled(tokens.tolist(), [] if raw is None else _told_logprobs(batch, tokens, raw))


def broken_rows_error(broken: list[int], num_rows: int) -> RuntimeError:
    """Of rows that no token can be drawn from."""
    return RuntimeError(f"logits are not finite in rows {broken} of {num_rows}: the model's output is broken")


def _edit(logits: Tensor, batch: SamplingBatch) -> None:
    if bias := batch.bias():
        add_bias(logits, *bias)
    if penalties := batch.penalties():
        apply_penalties(logits, *penalties)
    if len(batch.constrained_rows):
        apply_bitmask(logits, batch.constrained_rows, batch.bitmask())


def _raw_logprobs(logits: Tensor, batch: SamplingBatch) -> _RawLogprobs:
    rows = batch.logprob_rows
    raw = logits[rows] if batch.is_edited or len(rows) < len(logits) else logits
    return _RawLogprobs(raw, *top_logprobs(raw, np.arange(len(rows)), batch.num_top_logprobs))


def _told_logprobs(batch: SamplingBatch, tokens: Ints, raw: _RawLogprobs) -> list[TokenLogprobs | None]:
    rows = batch.logprob_rows
    chosen = raw.logits[torch.arange(len(rows)), torch.from_numpy(tokens[rows])].numpy() - raw.normalizers
    told: list[TokenLogprobs | None] = [None] * len(tokens)
    for row, logprob, ids, logprobs in zip(
        rows.tolist(),
        chosen.tolist(),
        raw.top_token_ids.tolist(),
        raw.top_logprobs.tolist(),
        strict=True,
    ):
        count = batch.requests[row].sampling.logprobs or 0
        told[row] = TokenLogprobs(logprob, ids[:count], logprobs[:count])
    return told


def _compile() -> None:
    """Calls every kernel once, so that no request waits for the compiler: seconds, at the first start."""
    logits = torch.zeros(2, 64)
    rows, floats = np.zeros(1, np.int64), np.ones(1)
    ids = np.zeros(1, np.int32)
    add_bias(logits, rows, rows, floats)
    apply_penalties(logits, rows, np.array([0, 1]), ids, ids, floats, floats, floats)
    apply_bitmask(logits, rows, np.full((1, 2), -1, np.int32))
    top_logprobs(logits, rows, 1)
    drawn = uniform(np.zeros(2, np.uint64), np.zeros(2, np.int64))
    sample_rows(logits, np.ones(2), np.full(2, 5), np.full(2, 0.5), np.full(2, 0.1), drawn)
