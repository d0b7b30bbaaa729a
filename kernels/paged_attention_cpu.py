"""Attention over a paged KV cache for CPUs, many sequences in one call.

The same result as `paged_attention_ref` up to rounding. Decodes read the cache where it lies; prompt chunks
go in tiles of queries, so that keys above the causal diagonal are mostly not computed. What to read and to
mask is planned once a step and used by every layer of the same kind.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention_decode import paged_attention_decode, supports_decode

# Queries of a prompt chunk in one call: at 512 the half-masked diagonal tile is what a usual chunk is.
_QUERY_TILE = 512


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences of one new token: arguments of `paged_attention_decode`."""

    rows: Tensor
    block_tables: Tensor
    table_starts: Tensor
    seq_lens: Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive queries of one sequence, and the keys that any of them sees."""

    rows: slice  # of the batch's queries
    blocks: Tensor | slice  # that hold the keys: a slice of the pool where they are neighbours
    first_key: int  # keys of the first block to leave out
    num_keys: int
    mask: Tensor | None  # additive, cache's dtype [1, 1, queries, num_keys]; None: causal, or all visible
    is_causal: bool


@dataclass(frozen=True, slots=True)
class PagedAttentionPlan:
    """What one step reads and masks for one kind of layer. From `plan_paged_attention`."""

    decodes: Decodes | None
    tiles: list[_Tile]
    sliding_window: int | None


def plan_paged_attention(
    block_tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    query_start_loc: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
) -> PagedAttentionPlan:
    """Plans a step; arguments as for `paged_attention_ref`, but on the host and without padding.

    block_tables: blocks of each sequence; dtype: of query and cache.
    """
    decodes = [i for i in range(len(seq_lens)) if query_start_loc[i + 1] - query_start_loc[i] == 1]
    tiles = [
        tile
        for i, seq_len in enumerate(seq_lens)
        if query_start_loc[i + 1] - query_start_loc[i] > 1
        for tile in _tiles(
            block_tables[i],
            seq_len,
            query_start_loc[i],
            query_start_loc[i + 1],
            block_size,
            dtype,
            sliding_window,
        )
    ]
    return PagedAttentionPlan(
        plan_decodes(
            [block_tables[i] for i in decodes],
            [seq_lens[i] for i in decodes],
            [query_start_loc[i] for i in decodes],
        )
        if decodes
        else None,
        tiles,
        sliding_window,
    )


def plan_decodes(
    block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int], rows: Sequence[int] | None = None
) -> Decodes:
    """For sequences of one new token. rows: their places in the batch; None: one after another."""
    flat: list[int] = []
    starts = []
    for table in block_tables:
        starts.append(len(flat))
        flat += table
    places = range(len(seq_lens)) if rows is None else rows
    return Decodes(*(torch.from_numpy(np.array(each, np.int64)) for each in (places, flat, starts, seq_lens)))


def paged_attention_cpu(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: PagedAttentionPlan, scale: float
) -> Tensor:
    """Causal attention in query's dtype: [num_tokens, num_heads, head_dim].

    query: [num_tokens, num_heads, head_dim]; key_cache, value_cache: [num_blocks, block_size, num_kv_heads,
    head_dim] of the same dtype, the new tokens already written.
    """
    output = torch.empty_like(query)
    if plan.decodes is not None:
        decodes = plan.decodes
        attend = paged_attention_decode if supports_decode(query, key_cache) else _attend_one_by_one
        attend(
            output,
            query,
            key_cache,
            value_cache,
            decodes.rows,
            decodes.block_tables,
            decodes.table_starts,
            decodes.seq_lens,
            scale,
            plan.sliding_window,
        )
    for tile in plan.tiles:
        output[tile.rows] = _attend_tile(query[tile.rows], key_cache, value_cache, tile, scale)
    return output


def _attend_one_by_one(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: Tensor,
    block_tables: Tensor,
    table_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None,
) -> None:
    """`paged_attention_decode` for other dtypes and head sizes."""
    block_size = key_cache.shape[1]
    for row, start, seq_len in zip(rows.tolist(), table_starts.tolist(), seq_lens.tolist(), strict=True):
        oldest = _oldest_visible(seq_len - 1, sliding_window)
        first_block = oldest // block_size
        tile = _Tile(
            rows=slice(row, row + 1),
            blocks=block_tables[start + first_block : start + _num_blocks(seq_len, block_size)],
            first_key=oldest % block_size,
            num_keys=seq_len - oldest,
            mask=None,
            is_causal=False,
        )
        output[tile.rows] = _attend_tile(query[tile.rows], key_cache, value_cache, tile, scale)


def _attend_tile(
    queries: Tensor, key_cache: Tensor, value_cache: Tensor, tile: _Tile, scale: float
) -> Tensor:
    group_size = queries.shape[1] // key_cache.shape[2]
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        _repeat_heads(_keys(key_cache, tile), group_size),
        _repeat_heads(_keys(value_cache, tile), group_size),
        attn_mask=tile.mask,
        is_causal=tile.is_causal,
        scale=scale,
    )
    return attended.squeeze(0).transpose(0, 1)


def _keys(cache: Tensor, tile: _Tile) -> Tensor:
    """[1, num_kv_heads, num_keys, head_dim]: a view where the blocks are neighbours, else a copy."""
    if isinstance(tile.blocks, slice):
        blocks = cache[tile.blocks]
    else:
        blocks = cache.index_select(0, tile.blocks)
    keys = blocks.view(1, -1, *cache.shape[2:])
    return keys[:, tile.first_key : tile.first_key + tile.num_keys].transpose(1, 2)


def _repeat_heads(keys: Tensor, group_size: int) -> Tensor:
    _, num_kv_heads, num_keys, head_dim = keys.shape
    if num_kv_heads == 1:
        return keys.expand(1, group_size, num_keys, head_dim)
    return keys.repeat_interleave(group_size, dim=1)


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _oldest_visible(position: int, sliding_window: int | None) -> int:
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)


def _tiles(
    block_table: Sequence[int],
    seq_len: int,
    start: int,
    end: int,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
) -> Iterator[_Tile]:
    offset = seq_len - end  # position of a row in the sequence, less its row number
    for tile_start in range(start, end, _QUERY_TILE):
        tile_end = min(tile_start + _QUERY_TILE, end)
        first_query, last_query = tile_start + offset, tile_end + offset
        oldest = _oldest_visible(first_query, sliding_window)
        first_block = oldest // block_size
        is_causal = first_query == 0 and (sliding_window is None or last_query <= sliding_window)
        mask = None
        if not is_causal:
            distance = torch.arange(first_query, last_query)[:, None] - torch.arange(oldest, last_query)
            hidden = distance < 0
            if sliding_window is not None:
                hidden |= distance >= sliding_window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[None, None]
        yield _Tile(
            rows=slice(tile_start, tile_end),
            blocks=_as_slice(block_table[first_block : _num_blocks(last_query, block_size)]),
            first_key=oldest - first_block * block_size,
            num_keys=last_query - oldest,
            mask=mask,
            is_causal=is_causal,
        )


def _as_slice(blocks: Sequence[int]) -> Tensor | slice:
    ids = np.array(blocks, np.int64)
    if np.array_equal(ids, np.arange(ids[0], ids[0] + len(ids))):
        return slice(int(ids[0]), int(ids[0]) + len(ids))
    return torch.from_numpy(ids)
