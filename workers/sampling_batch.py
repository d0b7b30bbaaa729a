"""What sampling needs to know of the requests of a batch, as arrays, made anew when the batch changes."""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workers.request import Request
from workers.token_counts import TokenCounts

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

_SEED_MASK = (1 << 64) - 1


class Penalties(NamedTuple):
    """The arguments of `kernels.logit_edits.apply_penalties` behind the logits."""

    rows: Ints
    offsets: Ints
    token_ids: Int32s
    counts: Int32s
    repetition: Floats
    frequency: Floats
    presence: Floats


class Bias(NamedTuple):
    """The arguments of `kernels.logit_edits.add_bias` behind the logits."""

    rows: Ints
    token_ids: Ints
    biases: Floats


class SamplingBatch:
    """Row i is requests[i]. The parameters stay; positions, counts and masks are read anew in every step."""

    def __init__(self, requests: Sequence[Request], vocab_size: int, eos_token_ids: Set[int]) -> None:
        self.requests = list(requests)
        self._eos_token_ids = eos_token_ids
        self._outputs = [request.output_token_ids for request in requests]
        params = [request.sampling for request in requests]
        self.temperature = np.array([p.temperature for p in params], np.float64)
        self.top_k = np.array([p.top_k for p in params], np.int64)
        self.top_p = np.array([p.top_p for p in params], np.float64)
        self.min_p = np.array([p.min_p for p in params], np.float64)
        self.seeds = np.array([p.seed & _SEED_MASK for p in params], np.uint64)
        self.logprob_rows = _rows(p.logprobs is not None for p in params)
        self.num_top_logprobs = min(max((p.logprobs or 0 for p in params), default=0), vocab_size)
        self._biases = [
            (row, entry.token_id, entry.bias) for row, p in enumerate(params) for entry in p.logit_bias
        ]
        self._bias = _bias(self._biases)
        self._min_tokens_rows = [row for row, p in enumerate(params) if p.min_tokens]
        self._penalized = [row for row, request in enumerate(requests) if _is_penalized(request)]
        penalized = [params[row] for row in self._penalized]
        self._repetition = np.array([p.repetition_penalty for p in penalized], np.float64)
        self._frequency = np.array([p.frequency_penalty for p in penalized], np.float64)
        self._presence = np.array([p.presence_penalty for p in penalized], np.float64)
        self.constrained_rows = _rows(request.constraint is not None for request in requests)
        self._bitmask = np.empty((len(self.constrained_rows), -(-vocab_size // 32)), np.int32)

    @property
    def is_edited(self) -> bool:
        """Whether any logit may be changed before sampling."""
        return bool(self._biases or self._min_tokens_rows or self._penalized or len(self.constrained_rows))

    def positions(self) -> Ints:
        """Output tokens so far, by row."""
        return np.array(list(map(len, self._outputs)), np.int64)

    def bias(self) -> Bias | None:
        """Logit biases, and -inf for what a request below its min_tokens may not end with.

        Constrained requests are not in the latter: see `bitmask`.
        """
        forbidden = [
            (row, token_id, -np.inf)
            for row in self._min_tokens_rows
            if self.requests[row].constraint is None
            for token_id in self._forbidden_ends(self.requests[row])
        ]
        if forbidden:
            return _bias(self._biases + forbidden)
        return self._bias if self._biases else None

    def penalties(self) -> Penalties | None:
        if not self._penalized:
            return None
        counts = []
        for row in self._penalized:
            request = self.requests[row]
            if request.token_counts is None:
                repeats = request.sampling.repetition_penalty != 1.0
                request.token_counts = TokenCounts(request.prompt_token_ids if repeats else ())
            request.token_counts.catch_up(request.output_token_ids)
            counts.append(request.token_counts)
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum([len(each.token_ids) for each in counts], out=offsets[1:])
        return Penalties(
            rows=np.array(self._penalized, np.int64),
            offsets=offsets,
            token_ids=np.concatenate([np.frombuffer(each.token_ids, np.int32) for each in counts]),
            counts=np.concatenate([np.frombuffer(each.counts, np.int32) for each in counts]),
            repetition=self._repetition,
            frequency=self._frequency,
            presence=self._presence,
        )

    def bitmask(self) -> Int32s:
        """What grammars allow, [len(constrained_rows), ceil(vocab_size / 32)].

        A grammar that is complete is stronger than min_tokens: nothing but the end could come.
        """
        for mask, row in zip(self._bitmask, self.constrained_rows.tolist(), strict=True):
            request = self.requests[row]
            assert request.constraint is not None
            request.constraint.fill_bitmask(mask)
            ends = self._forbidden_ends(request)
            if ends:
                without = _without(mask, ends)
                if without.any():
                    mask[:] = without
        return self._bitmask

    def _forbidden_ends(self, request: Request) -> list[int]:
        """The tokens that would end a request that has not reached its min_tokens."""
        sampling = request.sampling
        if len(request.output_token_ids) >= sampling.min_tokens:
            return []
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._eos_token_ids
        return sorted(ends)


def is_plain(request: Request) -> bool:
    """Whether its token is drawn from the logits as they are, and nothing is told of them."""
    params = request.sampling
    return not (
        params.logprobs is not None
        or params.logit_bias
        or params.min_tokens
        or request.constraint is not None
        or _is_penalized(request)
    )


def _is_penalized(request: Request) -> bool:
    params = request.sampling
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _rows(wanted: Iterable[bool]) -> Ints:
    return np.array([row for row, is_wanted in enumerate(wanted) if is_wanted], np.int64)


def _bias(entries: list[tuple[int, int, float]]) -> Bias:
    return Bias(
        rows=np.array([row for row, _, _ in entries], np.int64),
        token_ids=np.array([token_id for _, token_id, _ in entries], np.int64),
        biases=np.array([bias for _, _, bias in entries], np.float64),
    )


def _without(mask: Int32s, token_ids: Iterable[int]) -> Int32s:
    """The bitmask with some tokens' bits cleared."""
    cleared = mask.copy()
    words = cleared.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= ~np.uint32(1 << (token_id % 32))
    return cleared
