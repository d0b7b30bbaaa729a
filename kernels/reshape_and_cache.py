"""Writes new keys and values into the paged KV cache, on the GPU; to an FP8 cache rounded, by one scale."""

# mypy: disable-error-code="no-untyped-def"
# Triton reads annotations itself: of arguments that are compiled in, and no others.

import triton.language as tl
from torch import Tensor

from kernels.launch import FP8, FP8_MAX, Launch, check_rows, kernel, next_power_of_2


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """As `reshape_and_cache_ref`, but slots are not checked; a negative one (padding) is skipped."""
    launch(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale).run()


def launch(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float,
    v_scale: float,
) -> Launch:
    """What `reshape_and_cache` runs: a program for each token."""
    num_tokens, num_kv_heads, head_dim = key.shape
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        check_rows(name, new)
        if new.shape != (num_tokens, *cache.shape[2:]) or new.stride(1) != head_dim:
            raise ValueError(f"{name} must have the cache's heads {tuple(cache.shape[2:])}, contiguous")
        if not cache.is_contiguous():
            raise ValueError(f"{name}_cache must be contiguous")
    width = num_kv_heads * head_dim
    return Launch(
        _reshape_and_cache,
        (num_tokens,),
        {
            "key": key,
            "value": value,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slot_mapping": slot_mapping,
            "key_stride": key.stride(0),
            "value_stride": value.stride(0),
            "k_inverse": 1.0 / k_scale,
            "v_inverse": 1.0 / v_scale,
        },
        {
            "WIDTH": width,
            "WIDTH_PADDED": next_power_of_2(width),
            "LIMIT": FP8_MAX if key_cache.dtype is FP8 else None,
        },
        num_stages=1,
    )


@kernel
def _reshape_and_cache(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride,
    value_stride,
    k_inverse,
    v_inverse,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    LIMIT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    i = tl.arange(0, WIDTH_PADDED)
    new_key = tl.load(key + token * key_stride + i, mask=i < WIDTH)
    new_value = tl.load(value + token * value_stride + i, mask=i < WIDTH)
    if LIMIT is not None:
        new_key = tl.clamp(new_key.to(tl.float32) * k_inverse, -LIMIT, LIMIT)
        new_value = tl.clamp(new_value.to(tl.float32) * v_inverse, -LIMIT, LIMIT)
    place = slot * WIDTH + i
    tl.store(key_cache + place, new_key.to(key_cache.dtype.element_ty), mask=i < WIDTH)
    tl.store(value_cache + place, new_value.to(value_cache.dtype.element_ty), mask=i < WIDTH)
