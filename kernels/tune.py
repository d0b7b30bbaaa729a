"""Measures how kernels are best cut on the CUDA device that is here: what `kernels.tuned` has tables of.

A candidate counts only if it gives what the default gives, so that a miscompiled one is never chosen.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import torch
import triton
from torch import Tensor

from kernels import fp8_matmul, paged_attention
from kernels.launch import FP8, Launch
from kernels.launch_shapes import ATTENTION, BLOCK_SIZE
from kernels.tuned import Case, Measured, TunedTable

_WARMUP_MS, _MEASURE_MS = 20, 80
# What is measured: decodes of a busy worker, and a prompt beside them.
_NUM_SEQS, _SEQ_LEN, _CHUNK = 64, 4096, 2048
# Matrices (outputs, inputs) of Llama 8B and, in eight parts, 70B.
_MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (7168, 8192), (8192, 3584))
_ROWS = (1, 16, 64, 256, 2048)
_FP8_BLOCK = 128

Tiling = paged_attention.Tiling | fp8_matmul.Tiling
Launches = Callable[[Tiling], list[Launch]]


@dataclass(frozen=True, slots=True)
class Problem:
    """One case of a kernel: `launches` makes it by a tiling, and what it computes is then in `output`."""

    kernel: str
    case: Case
    default: Tiling
    candidates: list[Tiling]
    output: Tensor
    launches: Launches


def attention_candidates(default: paged_attention.Tiling) -> list[Tiling]:
    """The default and its neighbours: smaller and larger tiles, more warps, more loads under way."""
    found: list[Tiling] = [default]
    rows = sorted({default.block_m, 2 * default.block_m, max(16, default.block_m // 2)})
    for block_m, tile, warps, stages in product(rows, (16, 32, 64, 128), (4, 8), (1, 2, 3)):
        cut = replace(default, block_m=block_m, tile=tile, num_warps=warps, num_stages=stages)
        if cut != default:
            found.append(cut)
    return found


def matmul_candidates(default: fp8_matmul.Tiling, most_k: int) -> list[Tiling]:
    found: list[Tiling] = [default]
    for block_m, block_n, block_k, warps, stages in product(
        (16, 64, 128), (32, 64, 128), (64, 128), (4, 8), (3, 4)
    ):
        cut = fp8_matmul.Tiling(block_m, block_n, block_k, warps, stages)
        # Far more rows than there are cost time, far fewer read the matrix again and again.
        if cut != default and block_k <= most_k and default.block_m / 4 <= block_m <= default.block_m * 2:
            found.append(cut)
    return found


def attention_problems(device: torch.device) -> Iterator[Problem]:
    """Of all shapes of the catalogue."""
    seen = []
    for num_heads, num_kv_heads, head_dim, window in ATTENTION.values():
        group = num_heads // num_kv_heads
        for decode in (True, False):
            case = paged_attention.tuning_case(head_dim, group, 2, decode=decode)
            if case not in seen:
                seen.append(case)
                yield _attention(device, num_heads, num_kv_heads, head_dim, window, decode)


def _attention(
    device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, decode: bool
) -> Problem:
    num_seqs = _NUM_SEQS if decode else 1
    query_lens = [1] * num_seqs if decode else [_CHUNK]
    blocks = _SEQ_LEN // BLOCK_SIZE

    def cache() -> Tensor:
        shape = (num_seqs * blocks, BLOCK_SIZE, num_kv_heads, head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    query = torch.randn(sum(query_lens), num_heads, head_dim, dtype=torch.bfloat16, device=device)
    output = torch.empty_like(query)
    group = num_heads // num_kv_heads
    default = paged_attention.tiling(head_dim, group, 2, decode=decode)
    launches = partial(
        paged_attention.launches,
        output,
        query,
        cache(),
        cache(),
        torch.randperm(num_seqs * blocks, device=device).view(num_seqs, blocks).int(),
        torch.full((num_seqs,), _SEQ_LEN, dtype=torch.int32, device=device),
        torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        head_dim**-0.5,
        window,
        1.0,
        1.0,
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1,
    )
    case = paged_attention.tuning_case(head_dim, group, 2, decode=decode)
    return Problem(
        "paged_attention",
        case,
        default,
        [cut for cut in attention_candidates(default) if cut.block_m >= group],
        output,
        launches,
    )


def matmul_problems(device: torch.device) -> Iterator[Problem]:
    """With a scale a row, and in blocks as DeepSeek's and Qwen's checkpoints have them."""
    for (out_features, in_features), num_rows in product(_MATRICES, _ROWS):
        values = torch.randn(out_features, in_features, device=device).to(FP8)
        for block in (in_features, _FP8_BLOCK):
            x = torch.randn(num_rows, in_features, dtype=torch.bfloat16, device=device)
            scales = torch.rand(out_features, in_features // block, device=device)
            output = torch.empty(num_rows, out_features, dtype=torch.bfloat16, device=device)
            default = fp8_matmul.tiling(num_rows, in_features, block, 2)

            def launches(
                cut: Tiling,
                output: Tensor = output,
                x: Tensor = x,
                values: Tensor = values,
                scales: Tensor = scales,
                block: int = block,
            ) -> list[Launch]:
                assert isinstance(cut, fp8_matmul.Tiling)
                return [fp8_matmul.launch(output, x, values, scales, block, cut)]

            yield Problem(
                "fp8_matmul",
                fp8_matmul.tuning_case(num_rows, out_features, in_features, block, 2),
                default,
                matmul_candidates(default, min(block, 128)),
                output,
                launches,
            )


def measure(problem: Problem, seconds_of: Callable[[Callable[[], None]], float]) -> Measured:
    """The fastest candidate that is right. `seconds_of` times a computation."""

    def run(cut: Tiling) -> Callable[[], None]:
        started = problem.launches(cut)

        def compute() -> None:
            for launch in started:
                launch.run()

        return compute

    default = run(problem.default)
    default()
    expected = problem.output.float().clone()
    default_s = seconds_of(default)
    best, best_s = problem.default, default_s
    for cut in problem.candidates:
        if cut == problem.default:
            continue
        try:
            candidate = run(cut)
            problem.output.zero_()
            candidate()
            right = torch.allclose(problem.output.float(), expected, atol=2e-2, rtol=2e-2)
            seconds = seconds_of(candidate) if right else float("inf")
        except triton.runtime.errors.OutOfResources:
            continue
        if seconds < best_s:
            best, best_s = cut, seconds
    return Measured(
        problem.kernel,
        problem.case,
        asdict(best),
        round(best_s * 1e6, 2),
        round(default_s * 1e6, 2),
    )


def tune(device: torch.device, today: str, report: Callable[[str], None]) -> TunedTable:
    """All problems on the device, which takes minutes: most of it is compiling. `today` is the date."""
    from triton.testing import do_bench

    def seconds_of(compute: Callable[[], None]) -> float:
        milliseconds: float = do_bench(compute, warmup=_WARMUP_MS, rep=_MEASURE_MS, return_mode="median")
        return milliseconds / 1e3

    entries = []
    fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    problems = [attention_problems(device)] + ([matmul_problems(device)] if fp8 else [])
    for each in problems:
        for problem in each:
            measured = measure(problem, seconds_of)
            entries.append(measured)
            report(
                f"{measured.kernel} {dict(measured.case)}: {measured.us:.1f} us, "
                f"the default {measured.default_us:.1f}"
            )
    return TunedTable(
        torch.cuda.get_device_name(device),
        today,
        {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)},
        tuple(entries),
    )
