"""The decode kernel where its pieces, blocks, vectors and windows begin and end."""

import math

import pytest
import torch
from torch import Tensor

from kernels import paged_attention_decode as decode
from kernels.paged_attention_cpu import plan_decodes
from kernels.paged_attention_decode import paged_attention_decode

PIECE = decode._PIECE_KEYS


def _attend(
    query: Tensor,  # [num_heads, head_dim]
    keys: Tensor,  # [seq_len, num_kv_heads, head_dim]
    values: Tensor,
    block_size: int,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """By the kernel, in a shuffled pool where everything that must not be seen is NaN."""
    seq_len, num_kv_heads, head_dim = keys.shape
    num_blocks = -(-seq_len // block_size)
    table = torch.randperm(num_blocks + 2, generator=torch.Generator().manual_seed(seq_len))[:num_blocks]
    caches = []
    for rows in (keys, values):
        cache = torch.full((num_blocks + 2, block_size, num_kv_heads, head_dim), math.nan).bfloat16()
        for position in range(max(0, seq_len - (sliding_window or seq_len)), seq_len):
            cache[table[position // block_size], position % block_size] = rows[position]
        caches.append(cache)
    key_cache, value_cache = caches
    plan = plan_decodes([table.tolist()], [seq_len])
    output = torch.full_like(query[None], math.nan)
    paged_attention_decode(
        output,
        query[None],
        key_cache,
        value_cache,
        plan.rows,
        plan.block_tables,
        plan.table_starts,
        plan.seq_lens,
        scale,
        sliding_window,
    )
    return output[0]


def _expected(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """In fp64, over the visible keys."""
    oldest = max(0, len(keys) - (window or len(keys)))
    group = query.shape[0] // keys.shape[1]
    seen_keys, seen_values = (
        each[oldest:].double().repeat_interleave(group, dim=1) for each in (keys, values)
    )
    scores = torch.einsum("hd,khd->hk", query.double(), seen_keys) * scale
    return torch.einsum("hk,khd->hd", scores.softmax(1), seen_values)


def _random(seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seq_len * head_dim + num_heads)
    query = torch.randn(num_heads, head_dim, generator=generator).bfloat16()
    keys, values = (
        torch.randn(seq_len, num_kv_heads, head_dim, generator=generator).bfloat16() for _ in range(2)
    )
    return query, keys, values


def _assert_rounded(actual: Tensor, expected: Tensor) -> None:
    """That nothing but the last rounding to bf16, half a unit of 2^-8, and fp32 sums are between them."""
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("sliding_window", [None, 1, 15, 100, PIECE, PIECE + 1])
@pytest.mark.parametrize(
    "seq_len", [1, 2, 3, 15, 16, 17, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5, 5 * PIECE]
)
def test_pieces_blocks_and_windows(seq_len: int, sliding_window: int | None) -> None:
    query, keys, values = _random(seq_len, 4, 1, 64)
    actual = _attend(query, keys, values, 16, 0.125, sliding_window)
    _assert_rounded(actual, _expected(query, keys, values, 0.125, sliding_window))


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (7, 1), (6, 2), (8, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 48, 80, 128, 256])
def test_heads_that_fill_vectors_wholly_and_half(head_dim: int, heads: tuple[int, int]) -> None:
    query, keys, values = _random(150, *heads, head_dim)
    actual = _attend(query, keys, values, 16, head_dim**-0.5, None)
    _assert_rounded(actual, _expected(query, keys, values, head_dim**-0.5, None))


@pytest.mark.parametrize("block_size", [1, 5, 32, PIECE, 2 * PIECE])
def test_block_sizes(block_size: int) -> None:
    query, keys, values = _random(3 * PIECE + 7, 4, 2, 32)
    for sliding_window in (None, PIECE + 3):
        actual = _attend(query, keys, values, block_size, 0.2, sliding_window)
        _assert_rounded(actual, _expected(query, keys, values, 0.2, sliding_window))


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_scores_far_apart_in_different_pieces(order: str) -> None:
    """A later piece's maximum makes what came before vanish, or a later piece is nothing beside it."""
    query, keys, values = _random(4 * PIECE, 4, 1, 32)
    query = torch.ones_like(query)
    steps = torch.arange(len(keys)) // PIECE
    keys = ((steps if order == "rising" else 3 - steps) * 8.0)[:, None, None].expand_as(keys).bfloat16()
    actual = _attend(query, keys, values, 16, 1.0, None)
    _assert_rounded(actual, _expected(query, keys, values, 1.0, None))
    # A neighbouring piece is e^-256 away: only one counts.
    piece = values[-PIECE:] if order == "rising" else values[:PIECE]
    _assert_rounded(actual, piece[:, 0].double().mean(0).expand(4, -1))
    assert actual.isfinite().all()
