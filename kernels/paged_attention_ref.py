"""Attention over a paged KV cache (Kwon et al. 2023, section 4), plain torch.

Prefill chunks and decodes are the same thing: the last `query_len` tokens of a sequence look at all tokens
up to themselves. Each sequence is computed alone and over its own keys, so its result is a function of its
own tokens, chunk and blocks' contents, never of what else is in the batch.
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
) -> Tensor:
    """Causal attention in fp32, returned in query's dtype: [num_tokens, num_heads, head_dim].

    query: [num_tokens, num_heads, head_dim], the chunks of all sequences one after another;
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], num_heads a multiple of
    num_kv_heads, the new tokens already written; block_tables: int [num_seqs, max_blocks], entries past a
    sequence's end are not read; seq_lens: int [num_seqs], tokens with the new ones; query_start_loc: int
    [num_seqs + 1], where each chunk starts in query. With `sliding_window` a token looks at that many
    tokens, itself counted.
    """
    output = torch.empty_like(query)
    starts = query_start_loc.tolist()
    for index, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[index], starts[index + 1]
        output[start:end] = _attend(
            query[start:end], key_cache, value_cache, block_tables[index], seq_len, scale, sliding_window
        )
    return output


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_len: int,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    query_len, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    first_query = seq_len - query_len
    oldest = 0 if sliding_window is None else max(0, first_query - sliding_window + 1)
    first_block = oldest // block_size
    blocks = block_table[first_block : -(-seq_len // block_size)].to(torch.int64)
    first_key = first_block * block_size

    def gather(cache: Tensor) -> Tensor:  # [num_kv_heads, num_keys, head_dim]
        return cache[blocks].flatten(0, 1)[: seq_len - first_key].to(torch.float32).transpose(0, 1)

    grouped = query.to(torch.float32).view(query_len, num_kv_heads, -1, head_dim).transpose(0, 1)
    keys, values = gather(key_cache), gather(value_cache)
    scores = (
        grouped.flatten(1, 2) @ keys.transpose(1, 2) * scale
    )  # [num_kv_heads, query_len * group, num_keys]
    distance = torch.arange(first_query, seq_len)[:, None] - torch.arange(first_key, seq_len)[None, :]
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    hidden = hidden.repeat_interleave(num_heads // num_kv_heads, dim=0)
    attended = scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1) @ values
    return (
        attended.view(num_kv_heads, query_len, -1, head_dim)
        .transpose(0, 1)
        .reshape(query.shape)
        .to(query.dtype)
    )
