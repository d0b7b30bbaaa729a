"""Attention over a paged KV cache for CPUs, many sequences in one call.

The same result as `paged_attention_ref` up to rounding, in fewer and larger operations: which blocks to
gather and what to mask is planned once a step and used by every layer of the same kind; decodes are padded
into a few batches of similar length; prompt chunks go in tiles of queries, so that keys above the causal
diagonal are mostly not computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries of a prompt chunk in one call: at 512 the half-masked diagonal tile is what a usual chunk is.
_QUERY_TILE = 512
# Decodes whose block counts differ by less than this factor share a batch: padding costs at most as much
# again, and the number of batches stays logarithmic in the context length.
_PADDING_FACTOR = 2
_FEWEST_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences attended in one call: `rows` of the batch's queries, `query_len` for each sequence."""

    rows: Tensor | slice  # index into [num_tokens]
    blocks: Tensor  # int64 [num_seqs * num_blocks], to gather
    num_seqs: int
    query_len: int
    first_key: int  # keys of the gathered blocks to leave out, where the sequence is alone
    num_keys: int
    mask: Tensor | None  # cache's dtype [num_seqs or 1, 1, query_len or 1, num_keys]; None: all visible
    is_causal: bool


@dataclass(frozen=True, slots=True)
class PagedAttentionPlan:
    """What one step gathers and masks for one kind of layer. From `plan_paged_attention`."""

    groups: list[_Group]


def plan_paged_attention(
    block_tables: Sequence[Tensor],
    seq_lens: Sequence[int],
    query_start_loc: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
) -> PagedAttentionPlan:
    """Plans a step; arguments as for `paged_attention_ref`, but on the host and without padding.

    block_tables: int64 [blocks of the sequence] for each sequence; dtype: of query and cache.
    """
    decodes: dict[int, list[int]] = {}
    groups: list[_Group] = []
    for index, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[index], query_start_loc[index + 1]
        if end - start == 1:
            oldest = _oldest_visible(seq_len - 1, sliding_window)
            num_blocks = _num_blocks(seq_len, block_size) - oldest // block_size
            decodes.setdefault(_padded_class(num_blocks), []).append(index)
        else:
            groups += _chunk_groups(
                block_tables[index], seq_len, start, end, block_size, dtype, sliding_window
            )
    for members in decodes.values():
        groups.append(
            _decode_group(members, block_tables, seq_lens, query_start_loc, block_size, dtype, sliding_window)
        )
    return PagedAttentionPlan(groups)


def paged_attention_cpu(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: PagedAttentionPlan, scale: float
) -> Tensor:
    """Causal attention in query's dtype: [num_tokens, num_heads, head_dim].

    query: [num_tokens, num_heads, head_dim]; key_cache, value_cache: [num_blocks, block_size, num_kv_heads,
    head_dim] of the same dtype, the new tokens already written.
    """
    output = torch.empty_like(query)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    group_size = num_heads // num_kv_heads
    for group in plan.groups:
        keys = _gather(key_cache, group)  # [num_seqs, num_kv_heads, num_keys, head_dim]
        values = _gather(value_cache, group)
        queries = query[group.rows]
        if group.query_len == 1:
            # The heads that share a KV head are rows of one query: their keys are read once.
            attended = F.scaled_dot_product_attention(
                queries.view(group.num_seqs, num_kv_heads, group_size, head_dim),
                keys,
                values,
                attn_mask=group.mask,
                scale=scale,
            )
            output[group.rows] = attended.reshape(queries.shape)
        else:
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1).unsqueeze(0),
                _repeat_heads(keys, group_size),
                _repeat_heads(values, group_size),
                attn_mask=group.mask,
                is_causal=group.is_causal,
                scale=scale,
            )
            output[group.rows] = attended.squeeze(0).transpose(0, 1)
    return output


def _gather(cache: Tensor, group: _Group) -> Tensor:
    blocks = cache.index_select(0, group.blocks).view(group.num_seqs, -1, *cache.shape[2:])
    return blocks[:, group.first_key : group.first_key + group.num_keys].transpose(1, 2)


def _repeat_heads(keys: Tensor, group_size: int) -> Tensor:
    num_seqs, num_kv_heads, num_keys, head_dim = keys.shape
    if num_kv_heads == 1:
        return keys.expand(num_seqs, group_size, num_keys, head_dim)
    return keys.repeat_interleave(group_size, dim=1)


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _oldest_visible(position: int, sliding_window: int | None) -> int:
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)


def _padded_class(num_blocks: int) -> int:
    size = _FEWEST_BLOCKS
    while size < num_blocks:
        size *= _PADDING_FACTOR
    return size


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _chunk_groups(
    block_table: Tensor,
    seq_len: int,
    start: int,
    end: int,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
) -> Iterator[_Group]:
    """A prompt chunk in tiles of queries, each with the keys that any of its queries sees."""
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
            mask = _additive(hidden, dtype)[None, None]
        yield _Group(
            rows=slice(tile_start, tile_end),
            blocks=block_table[first_block : _num_blocks(last_query, block_size)],
            num_seqs=1,
            query_len=tile_end - tile_start,
            first_key=oldest - first_block * block_size,
            num_keys=last_query - oldest,
            mask=mask,
            is_causal=is_causal,
        )


def _decode_group(
    members: list[int],
    block_tables: Sequence[Tensor],
    seq_lens: Sequence[int],
    query_start_loc: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None,
) -> _Group:
    oldest = [_oldest_visible(seq_lens[index] - 1, sliding_window) for index in members]
    tables = [
        block_tables[index][first // block_size : _num_blocks(seq_lens[index], block_size)]
        for index, first in zip(members, oldest, strict=True)
    ]
    rows: Tensor | slice
    first_row, last_row = query_start_loc[members[0]], query_start_loc[members[-1]]
    if last_row - first_row == len(members) - 1:
        rows = slice(first_row, last_row + 1)
    else:
        rows = torch.tensor([query_start_loc[index] for index in members])
    if len(members) == 1:
        return _Group(
            rows=rows,
            blocks=tables[0],
            num_seqs=1,
            query_len=1,
            first_key=oldest[0] % block_size,
            num_keys=seq_lens[members[0]] - oldest[0],
            mask=None,
            is_causal=False,
        )
    # Padding gathers block 0: whatever it holds is finite and masked.
    blocks = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
    num_keys = blocks.shape[1] * block_size
    first_visible = torch.tensor([first % block_size for first in oldest])[:, None]
    num_visible = torch.tensor([seq_lens[i] - first for i, first in zip(members, oldest, strict=True)])[
        :, None
    ]
    distance = torch.arange(num_keys)[None, :] - first_visible
    mask = _additive((distance < 0) | (distance >= num_visible), dtype)
    return _Group(
        rows=rows,
        blocks=blocks.flatten(),
        num_seqs=len(members),
        query_len=1,
        first_key=0,
        num_keys=num_keys,
        mask=mask[:, None, None, :],
        is_causal=False,
    )
