"""Writes new keys and values into the paged KV cache, plain torch."""

import torch
from torch import Tensor


def reshape_and_cache_ref(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Stores token i at slot `slot_mapping[i]`: block slot // block_size, place slot % block_size.

    key, value: [num_tokens, num_kv_heads, head_dim]; key_cache, value_cache: [num_blocks, block_size,
    num_kv_heads, head_dim], changed in place; slot_mapping: int [num_tokens], all different. An FP8 cache
    (e4m3) holds what was given divided by the scale, at most ±448; other caches have no scale.
    Raises IndexError for a slot outside the cache.
    """
    slot_mapping = slot_mapping.long()
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        slots = cache.view(-1, *cache.shape[2:])
        if cache.dtype is torch.float8_e4m3fn:
            limit = torch.finfo(cache.dtype).max
            rounded = (new.to(torch.float32) / scale).clamp(-limit, limit).to(cache.dtype)
            # Torch copies rows of bytes, but not of this dtype.
            slots.view(torch.uint8).index_copy_(0, slot_mapping, rounded.view(torch.uint8))
        else:
            slots.index_copy_(0, slot_mapping, new.to(cache.dtype))
