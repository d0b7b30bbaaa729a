"""Kernels as they are compiled for GPUs that need not be there: nothing spills, shared memory suffices."""

import pytest
import torch
from torch import Tensor

from kernels.aot import ARCHS, Arch, compile_all, needs_fp8, parse_ptxas
from kernels.launch import FP8, Launch
from kernels.launch_shapes import all_launches, attention_launches, layer_launches

# All shapes are compiled by `headrace kernels aot`: a fifth of a minute for each architecture.
SHAPES = [("llama-8b", torch.bfloat16), ("llama-8b", FP8), ("gemma-270m", torch.bfloat16)]


def launches() -> dict[str, Launch]:
    found = layer_launches(torch.bfloat16)
    for name, cache_dtype in SHAPES:
        found |= attention_launches(name, torch.bfloat16, cache_dtype)
    return found


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_nothing_spills_and_shared_memory_suffices(arch: Arch) -> None:
    compiled = dict(compile_all(launches(), arch))
    for name, each in compiled.items():
        print(name, each.report())
        assert each.cubin.startswith(b"\x7fELF"), name
        assert each.spill_bytes == 0, name
        assert each.shared_bytes <= arch.shared_bytes, name
        assert each.registers * 32 * each.num_warps <= 65_536, name
    left_out = {name for name, launch in launches().items() if needs_fp8(launch)}
    assert compiled.keys() == launches().keys() - (set() if arch.has_fp8 else left_out)


def test_the_shapes_hold_every_kernel_and_both_ways_of_decoding() -> None:
    kernels = {launch.name for launch in all_launches().values()}
    assert kernels == {
        "paged_attention",
        "join_parts",
        "reshape_and_cache",
        "rms_norm",
        "rotary_embedding",
        "gated_activation",
        "sample_rows",
        "fp8_matmul",
    }
    splits = {
        launch.constants["NUM_SPLITS"] > 1
        for launch in all_launches().values()
        if launch.name == "paged_attention"
    }
    assert splits == {False, True}


def test_what_needs_fp8_is_known_by_its_tensors() -> None:
    found = all_launches()
    assert {name for name, launch in found.items() if needs_fp8(launch)} == {
        name
        for name in found
        if (".kv-fp8" in name and not name.startswith("join_parts")) or name.startswith("fp8_matmul")
    }


def test_all_launches_are_planned_without_memory() -> None:
    for launch in all_launches().values():
        for value in launch.arguments.values():
            assert not isinstance(value, Tensor) or value.device.type == "meta"


PTXAS = """ptxas info    : Compiling entry function '_rms_norm' for 'sm_90a'
ptxas info    : Function properties for _rms_norm
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 38 registers, used 1 barriers, 32 bytes smem
"""


def test_registers_and_spills_are_read_from_what_ptxas_prints() -> None:
    assert parse_ptxas(PTXAS) == (38, 32)
    with pytest.raises(RuntimeError, match="does not say what the kernel takes"):
        parse_ptxas("ptxas info    : Used 38 registers")
