"""The table of addresses that a Gemma decode in one call works from."""

import torch
from torch import Tensor

from kernels.block_int8_matmul import BlockPanelWeights
from kernels.gemma_decode import DecodeLayer, LayerTable
from kernels.gemma_phases import _KEYS, _VALUES

NUM_LAYERS = 3
BLOCK_ELEMENTS = 4 * 1 * 8


def layer() -> DecodeLayer:
    matrix = BlockPanelWeights(*(torch.zeros(1) for _ in range(3)))
    norm = torch.ones(1)
    return DecodeLayer(512, norm, matrix, norm, matrix, norm, norm, matrix, matrix, norm, norm)


def pools(memory: Tensor, num_blocks: int) -> list[Tensor]:
    """Keys and values of `num_blocks` blocks, the first from the start of `memory`."""
    half = len(memory) // 2
    size = NUM_LAYERS * num_blocks * BLOCK_ELEMENTS
    return [memory[start : start + size].view(NUM_LAYERS, num_blocks, 4, 1, 8) for start in (0, half)]


def test_a_pool_of_another_size_at_the_same_address_has_its_layers_elsewhere() -> None:
    table = LayerTable([layer() for _ in range(NUM_LAYERS)])
    memory = torch.zeros(2 * NUM_LAYERS * 16 * BLOCK_ELEMENTS, dtype=torch.bfloat16)
    for num_blocks in (16, 10, 16, 1):
        keys, values = pools(memory, num_blocks)
        words = table.with_caches(keys, values)
        assert words[:, _KEYS].tolist() == [each.data_ptr() for each in keys]
        assert words[:, _VALUES].tolist() == [each.data_ptr() for each in values]
