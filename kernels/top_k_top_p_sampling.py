"""Draws one token for each row of logits on the GPU: temperature, top-k, top-p, min-p, without sorting.

As `kernels.sampling`: what a filter keeps is a prefix of the row in descending order, said by where it ends:
an ordered key (the logit's bits), and how many of the tokens with just that key. Keys are found by bisection,
each step one pass over the row, which lies in the L2 cache. The reference is `kernels.sampling_ref`.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads annotations itself: of arguments that are compiled in, and no others.

import torch
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch, kernel, next_power_of_2
from kernels.sampling import BROKEN, LOWEST_TEMPERATURE

# Not measured on a device yet.
_BLOCK = 4096
_NUM_WARPS = 8


def sample_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """As `sampling_ref.sample_rows_ref`: int64 [num_rows], BROKEN where a row has nothing to draw from.

    logits: fp32 [num_rows, vocab_size], contiguous; the others [num_rows]: top_k int64, the rest fp64.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    launch(tokens, logits, temperature, top_k, top_p, min_p, uniform).run()
    return tokens


def launch(
    tokens: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Launch:
    """What `sample_rows` runs: a program for each row."""
    num_rows, vocab_size = logits.shape
    if logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous fp32, they are {logits.dtype}")
    return Launch(
        _sample_rows,
        (num_rows,),
        {
            "tokens": tokens,
            "logits": logits,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "uniform": uniform,
            "vocab_size": vocab_size,
        },
        {
            "BLOCK": min(_BLOCK, next_power_of_2(vocab_size)),
            "LOWEST_TEMPERATURE": LOWEST_TEMPERATURE,
            "BROKEN": BROKEN,
        },
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


@kernel
def _key_of(values):
    """int32 in the order of the values; both zeros are one. NaN lies beyond either infinity."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@kernel
def _load(logits, start, vocab_size, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    return tl.load(logits + i, mask=i < vocab_size, other=float("-inf"))


@kernel
def _weights_of(values, top, inverse):
    """Not yet divided by their sum: the largest has 1."""
    return tl.exp((values - top) * inverse)


@kernel
def _count(logits, vocab_size, key, BLOCK: tl.constexpr):
    """How many tokens have this key or a larger one."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        keys = _key_of(_load(logits, start, vocab_size, BLOCK))
        is_token = start + tl.arange(0, BLOCK) < vocab_size
        count += tl.sum((is_token & (keys >= key)).to(tl.int32), 0)
    return count


@kernel
def _mass(logits, vocab_size, key, top, inverse, BLOCK: tl.constexpr):
    """fp64 weight of all tokens with a larger key."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        values = _load(logits, start, vocab_size, BLOCK)
        mass += tl.sum(tl.where(_key_of(values) > key, _weights_of(values, top, inverse), 0.0), 0).to(
            tl.float64
        )
    return mass


@kernel
def _middle(low, high):
    """Of two int64 keys, rounded up."""
    return low + (high - low + 1) // 2


@kernel
def _kept(values, key, last, seen):
    """Which tokens of a block are kept, and how many of this key there were with it and the `seen` before."""
    keys = _key_of(values)
    equal = (keys == key).to(tl.int64)
    rank = seen + tl.cumsum(equal, 0)
    kept = ((keys > key) | ((keys == key) & (rank <= last))) & (values > float("-inf"))
    return kept, seen + tl.sum(equal, 0)


@kernel
def _sample_rows(
    tokens,
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    vocab_size,
    BLOCK: tl.constexpr,
    LOWEST_TEMPERATURE: tl.constexpr,
    BROKEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    # 1. The largest logit, the lowest id that has it, and whether the row can be drawn from.
    highest = tl.full([], -2147483648, tl.int32)
    lowest = tl.full([], 2147483647, tl.int32)
    first = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        keys = _key_of(_load(logits, start, vocab_size, BLOCK))
        block_highest = tl.max(keys, 0)
        if block_highest > highest:
            highest = block_highest
            first = tl.min(tl.where(keys == block_highest, i, 2147483647), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(i < vocab_size, keys, 2147483647), 0))
    heat = tl.load(temperature + row)
    kept_count = tl.load(top_k + row)
    if (lowest < -2139095041) | (highest >= 2139095040) | (highest == -2139095041):
        tl.store(tokens + row, BROKEN)
        return
    # Not `heat < LOWEST_TEMPERATURE`: NaN is greedy too.
    if (not (heat >= LOWEST_TEMPERATURE)) | (kept_count == 1):
        tl.store(tokens + row, first.to(tl.int64))
        return
    top = tl.load(logits + first)
    heat = tl.minimum(heat, 1e30)
    inverse = (1.0 / heat).to(tl.float32)

    # 2. top-k: the largest key that k tokens reach, and how many with just this key belong to them.
    key = tl.full([], -2139095041, tl.int64)  # of -inf
    last = tl.full([], 0, tl.int64) + vocab_size
    if (kept_count > 0) & (kept_count < vocab_size):
        low = lowest.to(tl.int64)
        high = highest.to(tl.int64)
        while low < high:
            middle = _middle(low, high)
            count = _count(logits, vocab_size, middle, BLOCK)
            if count >= kept_count:
                low = middle
                if count == kept_count:  # as good as the key itself
                    high = middle
            else:
                high = middle - 1
        key = low
        last = kept_count - _count(logits, vocab_size, key + 1, BLOCK)

    # 3. top-p: the largest key down to which the weights reach that share of what top-k left.
    share = tl.load(top_p + row)
    if share < 1.0:
        low = tl.maximum(key, lowest.to(tl.int64))
        value = _weight_of_key(low, top, inverse)
        count = tl.minimum(
            last, _count(logits, vocab_size, low, BLOCK) - _count(logits, vocab_size, low + 1, BLOCK)
        )
        target = share * (_mass(logits, vocab_size, low, top, inverse, BLOCK) + count * value)
        bottom = low
        high = highest.to(tl.int64)
        while low < high:
            middle = _middle(low, high)
            mass = _mass(logits, vocab_size, middle - 1, top, inverse, BLOCK)
            if mass >= target:
                low = middle
            else:
                high = middle - 1
        missing = target - _mass(logits, vocab_size, low, top, inverse, BLOCK)
        needed = tl.maximum(tl.ceil(missing / tl.maximum(_weight_of_key(low, top, inverse), 1e-300)), 1.0)
        if low > bottom:
            last = tl.full([], 0, tl.int64) + vocab_size
        last = tl.minimum(last, tl.minimum(needed, 2147483647.0).to(tl.int64))
        key = low

    # 4. min-p: all with a share of the largest probability.
    least = tl.load(min_p + row)
    if least > 0.0:
        floor = _key_of((top + heat * tl.log(tl.minimum(least, 1.0))).to(tl.float32)).to(tl.int64)
        if floor > key:
            key = floor
            last = tl.full([], 0, tl.int64) + vocab_size

    # 5. The weight of all that is kept, and the token where the sum passes `uniform` of it, by index.
    total = tl.full([], 0.0, tl.float64)
    seen = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        values = _load(logits, start, vocab_size, BLOCK)
        kept, seen = _kept(values, key, last, seen)
        total += tl.sum(tl.where(kept, _weights_of(values, top, inverse), 0.0), 0).to(tl.float64)
    target = tl.load(uniform + row) * total
    passed = tl.full([], 0.0, tl.float64)
    seen = tl.full([], 0, tl.int64)
    # Sums in another order differ in their last bits: past the end it is the last token with a weight.
    chosen = first
    found = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while (start < vocab_size) & (found == 0):
        i = start + tl.arange(0, BLOCK)
        values = _load(logits, start, vocab_size, BLOCK)
        kept, seen = _kept(values, key, last, seen)
        weights = tl.where(kept, _weights_of(values, top, inverse), 0.0)
        cumulative = passed + tl.cumsum(weights.to(tl.float64), 0)
        past = tl.min(tl.where((weights > 0) & (cumulative > target), i, 2147483647), 0)
        ended = tl.max(tl.where(weights > 0, i, -1), 0)
        if past < 2147483647:
            chosen = past
            found = tl.full([], 1, tl.int32)
        else:
            chosen = tl.where(ended >= 0, ended, chosen)
        passed += tl.sum(weights.to(tl.float64), 0)
        start += BLOCK
    tl.store(tokens + row, chosen.to(tl.int64))


@kernel
def _weight_of_key(key, top, inverse):
    bits = key.to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return _weights_of(value, top, inverse).to(tl.float64)
