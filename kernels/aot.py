"""Compiles kernels ahead of time, without a GPU, and tells what they take of one.

A `Launch` made from tensors of device "meta" has all that a compilation needs: dtypes, constants, and which
numbers are 1 or multiples of 16 (Triton compiles those in, at run time as here).
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.launch import Launch

_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}
_INT32 = range(-(2**31), 2**31)
_ALIGNED = 16
_PTXAS_TIMEOUT_S = 120
# ptxas of CUDA 13 needs it; Triton gives it too.
_PTXAS_OPTIONS = ("-v", "--regAllocOptLevel=2")


@dataclass(frozen=True, slots=True)
class Arch:
    """`capability`: 90 is sm_90. `shared_bytes`: at most for a program (CUDA C Programming Guide, table
    "Technical Specifications per Compute Capability")."""

    capability: int
    shared_bytes: int

    @property
    def has_fp8(self) -> bool:
        return self.capability >= 89

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"


ARCHS = {arch.name: arch for arch in (Arch(80, 163 * 1024), Arch(90, 227 * 1024), Arch(100, 227 * 1024))}


@dataclass(frozen=True, slots=True)
class Compiled:
    """registers: for a thread; shared_bytes: for a program; spill_bytes: stores and loads of a thread."""

    cubin: bytes
    registers: int
    shared_bytes: int
    spill_bytes: int
    num_warps: int

    def report(self) -> dict[str, int]:
        return {
            "registers": self.registers,
            "shared_bytes": self.shared_bytes,
            "spill_bytes": self.spill_bytes,
            "num_warps": self.num_warps,
        }


def compile_ahead(launch: Launch, arch: Arch) -> Compiled:
    """Raises RuntimeError in Triton's interpreter, or where ptxas fails."""
    if not isinstance(launch.kernel, JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter compiles nothing")
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: list[int] = []
    given = {**launch.arguments, **launch.constants}
    for index, name in enumerate(launch.kernel.arg_names):
        value = given[name]
        kind = "constexpr" if name in launch.constants else _kind(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[index,] = value
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % _ALIGNED == 0):
            aligned.append(index)
    source = ASTSource(
        launch.kernel,
        signature,
        constants,
        {(index,): [["tt.divisibility", _ALIGNED]] for index in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch.capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )
    registers, spilled = _resources(compiled.asm["ptx"], arch)
    return Compiled(
        compiled.asm["cubin"], registers, compiled.metadata.shared, spilled, compiled.metadata.num_warps
    )


def _kind(value: Tensor | float | None) -> str:
    """Triton's name of an argument's type; "constexpr" where its value is compiled in."""
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, int):
        return "i32" if value in _INT32 else "i64"
    return "fp32"


def _resources(ptx: str, arch: Arch) -> tuple[int, int]:
    """(registers, spilled bytes) as ptxas prints them."""
    nvidia = triton.knobs.nvidia
    ptxas = nvidia.ptxas_blackwell if arch.capability >= 100 else nvidia.ptxas
    found = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    target = found[1] if found else arch.name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        done = subprocess.run(
            [ptxas.path, *_PTXAS_OPTIONS, f"--gpu-name={target}", str(path), "-o", os.devnull],
            capture_output=True,
            text=True,
            timeout=_PTXAS_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"ptxas failed for {target}: {done.stderr.strip()}")
    return parse_ptxas(done.stderr)


def parse_ptxas(log: str) -> tuple[int, int]:
    """(registers, spilled bytes) from what `ptxas -v` prints. Raises RuntimeError where it does not say."""
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not spills:
        raise RuntimeError(f"ptxas does not say what the kernel takes: {log.strip()}")
    return max(registers), sum(int(stores) + int(loads) for stores, loads in spills)


def needs_fp8(launch: Launch) -> bool:
    return any(
        isinstance(value, Tensor) and value.dtype is torch.float8_e4m3fn
        for value in launch.arguments.values()
    )


def compile_all(launches: dict[str, Launch], arch: Arch) -> Iterator[tuple[str, Compiled]]:
    """All that the architecture can run: FP8 needs compute capability 8.9."""
    for name, launch in launches.items():
        if arch.has_fp8 or not needs_fp8(launch):
            yield name, compile_ahead(launch, arch)
