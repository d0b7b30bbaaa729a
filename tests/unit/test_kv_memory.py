import ctypes
import mmap
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.kv_memory import KVMemory

NUM_LAYERS = 3
BLOCK_SHAPE = (16, 2, 8)


def make_memory(
    num_blocks: int = 6, num_host_blocks: int = 4, dtype: torch.dtype = torch.bfloat16
) -> KVMemory:
    memory = KVMemory(
        num_blocks, num_host_blocks, num_layers=NUM_LAYERS, block_shape=BLOCK_SHAPE, dtype=dtype
    )
    generator = torch.Generator().manual_seed(0)
    for tensor in (memory.device.keys, memory.device.values, memory.host.keys, memory.host.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_that_goes_out_and_comes_in_elsewhere_is_the_same_in_all_layers(dtype: torch.dtype) -> None:
    memory = make_memory(dtype=dtype)
    keys, values = memory.device.keys.clone(), memory.device.values.clone()
    memory.swap([(5, 0), (1, 3)], [])
    memory.device.keys[:, [1, 5]] = 0
    memory.device.values[:, [1, 5]] = 0
    memory.swap([], [(0, 2), (3, 4)])
    for before, after in ((keys, memory.device.keys), (values, memory.device.values)):
        assert torch.equal(after[:, [2, 4]], before[:, [5, 1]])
        assert torch.equal(after[:, [0, 3]], before[:, [0, 3]]), "nothing else moves"


def test_what_goes_out_is_copied_before_anything_comes_in() -> None:
    memory = make_memory()
    on_device, on_host = memory.device.keys[:, 2].clone(), memory.host.keys[:, 1].clone()
    memory.swap([(2, 0)], [(1, 2)])
    assert torch.equal(memory.host.keys[:, 0], on_device)
    assert torch.equal(memory.device.keys[:, 2], on_host)


@given(st.permutations(range(4)), st.permutations(range(6)))
def test_pairs_go_where_they_say(host_blocks: list[int], device_blocks: list[int]) -> None:
    memory = make_memory()
    before = memory.device.values.clone()
    pairs = list(zip(device_blocks, host_blocks, strict=False))
    memory.swap(pairs, [])
    for device_block, host_block in pairs:
        assert torch.equal(memory.host.values[:, host_block], before[:, device_block])


def test_the_speed_is_measured_where_there_is_something_to_copy() -> None:
    assert make_memory().swap_bytes_per_s > 1e6
    assert make_memory(num_host_blocks=0).swap_bytes_per_s == 0.0


def resident_share(tensor: torch.Tensor) -> float:
    """Of the pages of a tensor's memory, as the kernel says."""
    page = mmap.PAGESIZE
    start = tensor.data_ptr() // page * page
    num_bytes = tensor.data_ptr() + tensor.numel() * tensor.itemsize - start
    flags = (ctypes.c_ubyte * -(-num_bytes // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), flags)
    assert status == 0, os.strerror(ctypes.get_errno())
    return sum(flag & 1 for flag in flags) / len(flags)


def test_all_pages_are_there_after_the_allocation() -> None:
    assert resident_share(torch.empty(100_000_000)) < 0.5, "what was not written is not there"
    memory = KVMemory(2000, 1000, num_layers=4, block_shape=(16, 1, 256), dtype=torch.bfloat16)
    for pool in (memory.device, memory.host):
        assert resident_share(pool.keys) == resident_share(pool.values) == 1.0
        assert not pool.keys.any()
        assert not pool.values.any()


@pytest.mark.parametrize(("sizes", "name"), [((0, 1), "num_blocks"), ((1, -1), "num_host_blocks")])
def test_refuses_impossible_sizes(sizes: tuple[int, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        KVMemory(*sizes, num_layers=1, block_shape=BLOCK_SHAPE, dtype=torch.float32)
