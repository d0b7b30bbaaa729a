"""Whether a model fits the memory of its devices, computed from its configuration before anything is loaded.

Pure. What counts is what one device of a tensor-parallel group holds: its shards of the weights, what a step
takes at its peak, and the KV blocks in what is left. Norms, biases and rotary tables are fp32, and whole on
every device; matrices are split by heads or columns, the vocabulary by rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isqrt

from workers.block_pool import BLOCK_SIZE
from workers.models.decoder_config import DecoderConfig
from workers.models.sharding import why_not_split
from workers.models.tensor_names import EMBEDDING, OUTPUT
from workers.models.tensor_shapes import tensor_shapes

GB = 10**9
# What is left is for the runtime: CUDA context, communication buffers, captured graphs, fragmentation.
MEMORY_SHARE = 0.9
_FP32_BYTES = 4
_INDEX_BYTES = 8
_SPLIT_BY_COLUMNS = ("attn_output", "ffn_down")
_OF_KV_HEADS = ("attn_k", "attn_v")


class Format(StrEnum):
    """What numbers are stored in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"

    @property
    def num_bytes(self) -> int:
        return {Format.FP32: 4, Format.BF16: 2}.get(self, 1)

    @property
    def computed_bytes(self) -> int:
        """Of an element that is computed with: one byte is widened."""
        return max(2, self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """How a model is to be run. `device_bytes` is the memory of one device, of which `memory_share` is used.

    `max_model_len` (None: the model's context), `max_num_batched_tokens` and `max_num_seqs` are the engine's
    limits. The KV pool must hold `min_kv_tokens` (None: one sequence of max_model_len). Embeddings and output
    matrix stay in bf16 where the rest is FP8, as in the checkpoints that are published;
    `output_copied`: a tied output matrix is in memory of its own.
    """

    device_bytes: int
    tensor_parallel: int = 1
    weight_format: Format = Format.BF16
    kv_format: Format = Format.BF16
    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    memory_share: float = MEMORY_SHARE
    min_kv_tokens: int | None = None
    output_copied: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError that names every bad field."""
        counts = (
            "device_bytes",
            "tensor_parallel",
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "min_kv_tokens",
        )
        errors = [
            f"{name} must be at least 1, got {value}"
            for name in counts
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if not 0 < self.memory_share <= 1:
            errors.append(f"memory_share must be above 0 and at most 1, got {self.memory_share}")
        if errors:
            raise ValueError("; ".join(errors))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes are of one device, but for `kv_bytes_per_token`, which all devices of the group take together
    where no KV head is on two of them.

    Raises ValueError where the heads or the feed-forward layer cannot be split over so many devices.
    """

    config: DecoderConfig
    vocab_size: int
    deployment: Deployment

    def __post_init__(self) -> None:
        if self.deployment.tensor_parallel not in (degrees := tensor_parallel_degrees(self.config)):
            raise ValueError(
                f"tensor_parallel {self.deployment.tensor_parallel} does not split {self.config.num_heads} "
                f"heads, {self.config.num_kv_heads} KV heads and {self.config.intermediate_size} columns "
                f"evenly: use {', '.join(map(str, degrees))}"
            )

    @property
    def max_model_len(self) -> int:
        longest = self.config.context_length
        return min(self.deployment.max_model_len or longest, longest)

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(_numel(shape) for _, shape in tensor_shapes(self.config, self.vocab_size))

    @property
    def weight_bytes(self) -> int:
        """Matrices, norms, biases and rotary tables."""
        num_tables = 1 if self.config.local_rope_base is None else 2
        tables = num_tables * self.max_model_len * self.config.head_dim * _FP32_BYTES
        return tables + sum(self._tensor_bytes())

    def _tensor_bytes(self) -> Iterator[int]:
        config, deployment = self.config, self.deployment
        ranks, stored = deployment.tensor_parallel, deployment.weight_format
        for name, shape in tensor_shapes(config, self.vocab_size):
            part = name.split(".")[-2]
            if name in (EMBEDDING, OUTPUT):
                widened = Format.BF16 if stored is Format.FP8 else stored
                copies = 2 if name == EMBEDDING and config.tied_embeddings and deployment.output_copied else 1
                yield copies * -(-shape[0] // ranks) * shape[1] * widened.num_bytes
            elif part in ("attn_q_norm", "attn_k_norm"):  # one weight for each head
                heads = config.num_heads // ranks if part == "attn_q_norm" else self._kv_heads
                yield heads * shape[0] * _FP32_BYTES
            elif name.endswith(".bias") and part not in _OF_KV_HEADS:
                yield shape[0] // ranks * _FP32_BYTES
            elif name.endswith(".bias"):
                yield self._kv_heads * config.head_dim * _FP32_BYTES
            elif len(shape) == 1:
                yield shape[0] * _FP32_BYTES
            else:
                rows, columns = shape
                if part in _OF_KV_HEADS:
                    rows = self._kv_heads * config.head_dim
                elif part in _SPLIT_BY_COLUMNS:
                    columns //= ranks
                else:
                    rows //= ranks
                # FP8 has scales, of which there is at most one a row.
                scales = rows * _FP32_BYTES if stored is Format.FP8 else 0
                yield rows * columns * stored.num_bytes + scales

    @property
    def _kv_heads(self) -> int:
        """On one device: where there are fewer than devices, some have the same."""
        return max(1, self.config.num_kv_heads // self.deployment.tensor_parallel)

    @property
    def step_bytes(self) -> int:
        """What a step of all the tokens that it may have takes at its peak, if each operation is one of plain
        torch (`models.decoder`): kernels that fuse them take less.

        The peak is where a layer rotates its heads or activates its feed-forward layer, while the tensors of
        the layer before it are not gone yet, or in the logits of all sequences.
        """
        config, ranks = self.config, self.deployment.tensor_parallel
        computed = self.deployment.weight_format.computed_bytes
        hidden, intermediate = config.hidden_size, config.intermediate_size // ranks
        query, kv = config.query_size // ranks, self._kv_heads * config.head_dim
        # Residual stream, its norm and that one's square in fp32; what matrices take and give.
        stream = 3 * _FP32_BYTES * hidden + 3 * computed * hidden
        positions = 3 * _INDEX_BYTES + 2 * _FP32_BYTES * config.head_dim
        layer_before = computed * (2 * query + 3 * kv) + 2 * computed * (query + intermediate)
        attention = computed * (2 * query + 3 * kv) + 3 * _FP32_BYTES * (query + kv)
        feed_forward = 4 * computed * intermediate
        num_tokens = self.deployment.max_num_batched_tokens
        in_layer = num_tokens * (stream + positions + layer_before + max(attention, feed_forward))
        logits = self.deployment.max_num_seqs * self.vocab_size * (computed + 2 * _FP32_BYTES)
        return max(in_layer, num_tokens * (stream + positions) + logits)

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.config
        return (
            2
            * config.num_layers
            * config.num_kv_heads
            * config.head_dim
            * self.deployment.kv_format.num_bytes
        )

    @property
    def bytes_per_block(self) -> int:
        """On one device."""
        config = self.config
        elements = 2 * config.num_layers * BLOCK_SIZE * self._kv_heads * config.head_dim
        return elements * self.deployment.kv_format.num_bytes

    @property
    def usable_bytes(self) -> int:
        return int(self.deployment.device_bytes * self.deployment.memory_share)

    @property
    def room_bytes(self) -> int:
        """What is left for KV blocks; negative where even the rest does not fit."""
        return self.usable_bytes - self.weight_bytes - self.step_bytes

    @property
    def num_blocks(self) -> int:
        return max(0, self.room_bytes // self.bytes_per_block)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits, of all sequences together."""
        return self.num_blocks * BLOCK_SIZE

    @property
    def min_blocks(self) -> int:
        return -(-(self.deployment.min_kv_tokens or self.max_model_len) // BLOCK_SIZE)

    @property
    def fits(self) -> bool:
        return self.num_blocks >= self.min_blocks

    def problem(self) -> str | None:
        """What does not fit, in numbers; None where all does."""
        if self.fits:
            return None
        tokens = self.min_blocks * BLOCK_SIZE
        kv_bytes = self.min_blocks * self.bytes_per_block
        return (
            f"the model does not fit: {_gb(self.weight_bytes)} of weights, {_gb(self.step_bytes)} for a step "
            f"and {_gb(kv_bytes)} of KV for {tokens} tokens, and {_gb(self.usable_bytes)} can be used"
        )

    def remedy(self) -> str:
        """What to change where it does not fit."""
        for degree in tensor_parallel_degrees(self.config):
            if degree > self.deployment.tensor_parallel:
                more = replace(self.deployment, tensor_parallel=degree)
                if MemoryPlan(self.config, self.vocab_size, more).fits:
                    remedies = [f"it needs TP >= {degree}"]
                    break
        else:
            remedies = ["no TP is enough"]
        if self.num_blocks:
            remedies.append(f"or a max_model_len of at most {self.kv_tokens}")
        return ", ".join(remedies)


def tensor_parallel_degrees(config: DecoderConfig) -> list[int]:
    """Numbers of devices that the model can be split over evenly; KV heads may be on several."""
    heads = config.num_heads
    divisors = [count for count in range(1, isqrt(heads) + 1) if heads % count == 0]
    both = {*divisors, *(heads // count for count in divisors)}
    return [degree for degree in sorted(both) if not why_not_split(config, degree)]


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / 1e6:.1f} MB"
