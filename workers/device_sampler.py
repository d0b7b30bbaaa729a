"""Picks the next tokens from logits on a GPU: there, where they are drawn as they are, else on the CPU.

Only the rows whose logits are edited first, or told of, are copied: those with penalties, biases, min_tokens,
a grammar or log probabilities. Random numbers are the same ones in both places.
"""

from collections.abc import Set

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import Operations
from kernels.sampling import BROKEN
from kernels.uniform import uniform
from schemas.sampling import TokenLogprobs
from workers.request import Request
from workers.sampler import Sampled, Sampler, broken_rows_error
from workers.sampling_batch import SamplingBatch, is_plain


class DeviceSampler:
    """As `Sampler`, for logits on a device."""

    def __init__(self, operations: Operations, eos_token_ids: Set[int] = frozenset()) -> None:
        """`eos_token_ids`: what may not come before min_tokens."""
        self._operations = operations
        self._sampler = Sampler(eos_token_ids)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._batch = SamplingBatch([], 0, self._eos_token_ids)
        self._columns: list[Tensor] = []

    def sample(self, logits: Tensor, requests: list[Request]) -> Sampled:
        """One token for each row; arguments, result and errors as of `Sampler.sample`.

        logits: fp32 [num_rows, vocab_size] on the device, contiguous.
        """
        if len(logits) != len(requests):
            raise ValueError(f"{len(logits)} rows, {len(requests)} requests")
        plain = [row for row, request in enumerate(requests) if is_plain(request)]
        if len(plain) == len(requests):
            return Sampled(self._draw(logits, requests), []) if requests else Sampled([], [])
        edited = [row for row, request in enumerate(requests) if not is_plain(request)]
        tokens = [BROKEN] * len(requests)
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        copied = logits.index_select(0, torch.tensor(edited, device=logits.device)).cpu()
        sampled = self._sampler.sample(copied, [requests[row] for row in edited])
        for row, token_id in zip(edited, sampled.token_ids, strict=True):
            tokens[row] = token_id
        for row, told in zip(edited, sampled.logprobs, strict=False):
            logprobs[row] = told
        if plain:
            rows = logits.index_select(0, torch.tensor(plain, device=logits.device))
            drawn = self._draw(rows, [requests[row] for row in plain])
            for row, token_id in zip(plain, drawn, strict=True):
                tokens[row] = token_id
        return Sampled(tokens, logprobs if sampled.logprobs else [])

    def _draw(self, logits: Tensor, requests: list[Request]) -> list[int]:
        device = logits.device
        if self._batch.requests != requests:
            self._batch = batch = SamplingBatch(requests, logits.shape[1], self._eos_token_ids)
            arrays = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
            self._columns = [torch.from_numpy(array).to(device) for array in arrays]
        numbers = torch.from_numpy(uniform(self._batch.seeds, self._batch.positions())).to(device)
        tokens = self._operations.sample_rows(logits, *self._columns, numbers).cpu().numpy()
        broken = np.flatnonzero(tokens == BROKEN).tolist()
        if broken:
            raise broken_rows_error(broken, len(logits))
        drawn: list[int] = tokens.tolist()
        return drawn
