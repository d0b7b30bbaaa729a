"""How long a step takes on a GPU that is not there: a roofline of device, model and batch. Pure.

    step = max(FLOPs / (FLOP/s x utilisation), bytes / bandwidth) + overhead

over all GPUs of the tensor-parallel group together (Williams, Waterman, Patterson, "Roofline", CACM 52(4),
2009). Bytes are the weights, once, and the keys and values of each sequence's context. What tensor
parallelism costs in all-reduces is part of the utilisation.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from workers.block_pool import BLOCK_SIZE


class DType(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def num_bytes(self) -> int:
        return 2 if self is DType.BF16 else 1


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. FLOP/s are dense: datasheets print twice as much, with sparsity."""

    bf16_flops: float
    fp8_flops: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    pcie_bytes_per_s: float  # one way

    def flops(self, dtype: DType) -> float:
        return self.bf16_flops if dtype is DType.BF16 else self.fp8_flops


# NVIDIA H100, H200 (SXM) and DGX B200 datasheets. All three have PCIe 5.0 x16: 64 GB/s one way.
DEVICES = {
    "h100": Device(989e12, 1979e12, 80e9, 3.35e12, 64e9),
    "h200": Device(989e12, 1979e12, 141e9, 4.8e12, 64e9),
    "b200": Device(2250e12, 4500e12, 180e9, 8e12, 64e9),
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated feed-forward layer (Llama's kind)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @cached_property  # asked for in every step
    def layer_parameters(self) -> int:
        """All matrices that every token is multiplied with."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @cached_property
    def head_parameters(self) -> int:
        """The output matrix: only tokens that sample meet it. The input embedding has the same size."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        return self.layer_parameters + 2 * self.head_parameters

    def kv_bytes_per_token(self, dtype: DType) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.num_bytes


# Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3).
MODELS = {
    "8b": ModelShape(32, 4096, 32, 8, 128, 14_336, 128_256),
    "70b": ModelShape(80, 8192, 64, 8, 128, 28_672, 128_256),
}


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step asks for, summed over its sequences.

    `num_sampled` tokens go through the output matrix. `context_tokens` are the tokens whose keys and values
    are read: each sequence's length with this step's tokens. `attended_pairs` are (new token, token it looks
    at): a decode in a context of n has n, a prompt of n has n (n + 1) / 2.
    """

    num_tokens: int
    num_sampled: int
    context_tokens: int
    attended_pairs: int

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int, bool]]) -> "StepLoad":
        """Of (tokens computed before, new tokens, whether the last one samples) for each sequence."""
        num_tokens = num_sampled = context_tokens = attended_pairs = 0
        for computed, new, samples in chunks:
            num_tokens += new
            num_sampled += samples
            context_tokens += computed + new
            attended_pairs += new * computed + new * (new + 1) // 2
        return cls(num_tokens, num_sampled, context_tokens, attended_pairs)


class StepCosts(Protocol):
    """What a simulated worker's memory holds, and how long it takes for what."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def swap_bytes_per_s(self) -> float: ...

    def step_seconds(self, load: StepLoad) -> float:
        """Of one step."""

    def decode_seconds(self, num_seqs: int) -> Callable[[int], float]:
        """Of steps that decode one token of each of `num_seqs` sequences, by the tokens of their contexts."""

    def swap_seconds(self, num_blocks: int) -> float:
        """Of copying blocks to or from the host."""


@dataclass(frozen=True)
class Roofline:
    """A model on a tensor-parallel group of GPUs.

    `compute_dtype` is what matrices are multiplied in; weights of FP8 may be widened to BF16 for it. The
    shares are of the datasheet's peaks: 50 % is what good kernels reach in a long prefill; decoding kernels
    come close to the bandwidth, which is taken whole; `memory_share` of HBM is used for weights and KV, the
    rest is for activations and the runtime. `overhead_s` is what a step costs on top, however small: launch
    of the captured graph, sampling, and the copy of the tokens to the host.

    Raises ValueError that says what does not fit.
    """

    device: Device
    model: ModelShape
    tensor_parallel: int = 1
    weight_dtype: DType = DType.FP8
    kv_dtype: DType = DType.BF16
    compute_dtype: DType = DType.BF16
    compute_utilisation: float = 0.5
    bandwidth_utilisation: float = 1.0
    pcie_utilisation: float = 0.8
    memory_share: float = 0.9
    overhead_s: float = 0.2e-3

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.model.num_kv_heads % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel must divide the {self.model.num_kv_heads} KV heads, "
                f"got {self.tensor_parallel}"
            )
        for name in ("compute_utilisation", "bandwidth_utilisation", "pcie_utilisation", "memory_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        if self.overhead_s < 0:
            raise ValueError(f"overhead_s must not be negative, got {self.overhead_s}")
        if self.kv_bytes < self.bytes_per_block:
            raise ValueError(
                f"{self.weight_bytes / 1e9:.0f} GB of weights leave no room for KV in "
                f"{self.memory_share:.0%} of {self.tensor_parallel} x {self.device.hbm_bytes / 1e9:.0f} GB: "
                f"{self._advice()}"
            )

    def _advice(self) -> str:
        """What a model that does not fit needs."""
        each = self.device.hbm_bytes * self.memory_share
        for gpus in range(self.tensor_parallel + 1, self.model.num_kv_heads + 1):
            room = gpus * each - self.weight_bytes
            if self.model.num_kv_heads % gpus == 0 and room >= self.bytes_per_block:
                return f"it needs tensor_parallel >= {gpus}"
        return "no tensor_parallel is enough"

    @property
    def weight_bytes(self) -> int:
        """HBM that the weights take, over all GPUs."""
        return self.model.num_parameters * self.weight_dtype.num_bytes

    @cached_property  # asked for in every step, as the next two are
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token(self.kv_dtype)

    @cached_property
    def flops_per_s(self) -> float:
        """Of all GPUs, as far as they are used."""
        return self.tensor_parallel * self.device.flops(self.compute_dtype) * self.compute_utilisation

    @cached_property
    def hbm_bytes_per_s(self) -> float:
        """Of all GPUs, as far as it is used."""
        return self.tensor_parallel * self.device.hbm_bytes_per_s * self.bandwidth_utilisation

    @property
    def bytes_per_block(self) -> int:
        return BLOCK_SIZE * self.kv_bytes_per_token

    @property
    def kv_bytes(self) -> float:
        """HBM that is left for KV, over all GPUs."""
        return self.tensor_parallel * self.device.hbm_bytes * self.memory_share - self.weight_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of KV that fit the HBM left."""
        return int(self.kv_bytes // self.bytes_per_block)

    @property
    def swap_bytes_per_s(self) -> float:
        """Between HBM and pinned host memory, one way: each GPU copies its own heads over its own link."""
        return self.tensor_parallel * self.device.pcie_bytes_per_s * self.pcie_utilisation

    def compute_seconds(self, load: StepLoad) -> float:
        """Two FLOPs a parameter and token; scores and their weighted sum, two each a pair and channel."""
        model = self.model
        multiplied = load.num_tokens * model.layer_parameters + load.num_sampled * model.head_parameters
        attention = 4 * model.num_layers * model.num_heads * model.head_dim * load.attended_pairs
        return (2 * multiplied + attention) / self.flops_per_s

    def memory_seconds(self, load: StepLoad) -> float:
        """The weights are read once a step, and the KV of the contexts; new KV is written."""
        parameters = self.model.layer_parameters + (self.model.head_parameters if load.num_sampled else 0)
        num_bytes = parameters * self.weight_dtype.num_bytes
        num_bytes += (load.context_tokens + load.num_tokens) * self.kv_bytes_per_token
        return num_bytes / self.hbm_bytes_per_s

    def step_seconds(self, load: StepLoad) -> float:
        """The slower of the two, for each overlaps the other, and the overhead."""
        return max(self.compute_seconds(load), self.memory_seconds(load)) + self.overhead_s

    def decode_seconds(self, num_seqs: int) -> Callable[[int], float]:
        """`step_seconds` of steps that decode one token of each of `num_seqs` sequences, by the tokens of
        their contexts: each new token looks at all of its own. To the last bit, and ten times as fast.
        """
        model = self.model
        fixed_flops = 2 * num_seqs * (model.layer_parameters + model.head_parameters)
        pair_flops = 4 * model.num_layers * model.num_heads * model.head_dim
        flops_per_s, bytes_per_s = self.flops_per_s, self.hbm_bytes_per_s
        kv_bytes = self.kv_bytes_per_token
        fixed_bytes = (model.layer_parameters + model.head_parameters) * self.weight_dtype.num_bytes
        fixed_bytes += num_seqs * kv_bytes
        overhead_s = self.overhead_s

        def seconds(context_tokens: int) -> float:
            compute_s = (fixed_flops + pair_flops * context_tokens) / flops_per_s
            memory_s = (fixed_bytes + kv_bytes * context_tokens) / bytes_per_s
            return (compute_s if compute_s > memory_s else memory_s) + overhead_s

        return seconds

    def swap_seconds(self, num_blocks: int) -> float:
        """Time to copy blocks between HBM and host memory, one after the other."""
        return num_blocks * self.bytes_per_block / self.swap_bytes_per_s
