"""Writes new keys and values into the paged KV cache, plain torch."""

from torch import Tensor


def reshape_and_cache_ref(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Stores token i at slot `slot_mapping[i]`: block slot // block_size, place slot % block_size.

    key, value: [num_tokens, num_kv_heads, head_dim]; key_cache, value_cache: [num_blocks, block_size,
    num_kv_heads, head_dim], changed in place; slot_mapping: int64 [num_tokens], all different.
    Raises IndexError for a slot outside the cache.
    """
    for new, cache in ((key, key_cache), (value, value_cache)):
        slots = cache.view(-1, *cache.shape[2:])
        slots.index_copy_(0, slot_mapping, new.to(cache.dtype))
