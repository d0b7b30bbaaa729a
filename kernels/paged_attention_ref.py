"""Attention over a paged KV cache (Kwon et al. 2023, section 4), plain torch.

Prefill chunks and decodes are the same thing: the last `query_len` tokens of a sequence look at all tokens
up to themselves. Every token is computed alone over its own keys, so its result is a function of its
sequence up to itself, bit for bit: not of what else is in the batch, nor of where a chunk begins.
"""

import torch
from torch import Tensor


def paged_attention_ref(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Causal attention in fp32, returned in query's dtype: [num_tokens, num_heads, head_dim].

    query: [num_tokens, num_heads, head_dim], the chunks of all sequences one after another;
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], num_heads a multiple of
    num_kv_heads, the new tokens already written; block_tables: int [num_seqs, max_blocks], entries past a
    sequence's end are not read; seq_lens: int [num_seqs], tokens with the new ones; query_start_loc: int
    [num_seqs + 1], where each chunk starts in query. With `sliding_window` a token looks at that many
    tokens, itself counted. k_scale, v_scale: what the values of an FP8 cache are multiplied with.
    """
    output = torch.empty_like(query)
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    grouped = query.to(torch.float32).view(len(query), num_kv_heads, num_heads // num_kv_heads, head_dim)
    starts = query_start_loc.tolist()
    for index, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[index], starts[index + 1]
        offset = seq_len - end  # position of a row in its sequence, less its row number
        first_block = _oldest_visible(start + offset, sliding_window) // block_size
        first_key = first_block * block_size
        blocks = block_tables[index, first_block : -(-seq_len // block_size)]
        keys, values = (  # [num_kv_heads, num_keys, head_dim]
            cache.index_select(0, blocks).flatten(0, 1).to(torch.float32).transpose(0, 1)
            for cache in (key_cache, value_cache)
        )
        if v_scale != 1.0:
            values = values * v_scale
        for row in range(start, end):
            position = row + offset
            visible = slice(_oldest_visible(position, sliding_window) - first_key, position + 1 - first_key)
            scores = grouped[row] @ keys[:, visible].transpose(1, 2) * (scale * k_scale)
            attended = scores.softmax(dim=-1) @ values[:, visible]
            output[row] = attended.view(num_heads, head_dim)
    return output


def _oldest_visible(position: int, sliding_window: int | None) -> int:
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)
