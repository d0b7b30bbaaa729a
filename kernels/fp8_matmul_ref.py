"""Multiplies with a matrix whose weights are FP8 (Micikevicius et al. 2022), plain torch."""

from torch import Tensor

LEAST_K = 16  # of a tensor core's multiplication
_MOST_K = 128


def fp8_matmul_ref(x: Tensor, values: Tensor, scales: Tensor, block: int) -> Tensor:
    """`x @ (values × scales).T` in fp32, returned in x's dtype: [num_rows, out_features].

    x: [num_rows, in_features]; values: FP8 [out_features, in_features]; scales: fp32 [out_features,
    ceil(in_features / block)], each of `block` inputs of an output.
    """
    spread = scales.repeat_interleave(block, dim=1)[:, : values.shape[1]]
    return (x.float() @ (values.float() * spread).T).to(x.dtype)


def block_size_k(in_features: int, block: int) -> int:
    """Inputs at once, which share their scales. 0: the blocks are of a size that cannot be cut so."""
    if block >= in_features:
        return _MOST_K
    largest = min(block & -block, _MOST_K)  # power of two that divides it
    return largest if largest >= LEAST_K else 0
