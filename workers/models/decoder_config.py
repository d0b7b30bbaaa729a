"""Sizes and kinds of the decoders that are served, whatever file they were read from. Pure.

One form for Llama 3 (Grattafiori et al. 2024), Qwen 2.5 (Yang et al. 2024), Qwen 3 (Yang et al. 2025) and
Gemma 3 (Gemma Team 2025): pre-norm, rotary positions, grouped-query attention, a gated feed-forward layer.
"""

from dataclasses import dataclass
from enum import StrEnum

from workers.weights.errors import WeightsError

# The largest models have some 130. What a file says is looked at before its tensors are.
MOST_LAYERS = 1024


class Architecture(StrEnum):
    """By the names that GGUF uses. In a config.json they are `model_type`s, of which Gemma has two."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    GEMMA3 = "gemma3"


class Activation(StrEnum):
    """Of the gate of a feed-forward layer."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: low frequencies divided by `factor`, high ones kept, those between interpolated. Wave
    lengths of more than original_context_length / low_freq_factor are low."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


RopeScaling = LinearScaling | Llama3Scaling


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What a decoder is, all sizes in elements or counts.

    `layer_windows` holds the sliding window of each layer in tokens, None where it attends to all. Layers
    with a window rotate with `local_rope_base` and without scaling, where that is given. Queries are
    multiplied with `attention_scale`, embeddings with `embedding_scale`.
    """

    architecture: Architecture
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_epsilon: float
    rope_base: float
    layer_windows: tuple[int | None, ...]
    attention_scale: float
    activation: Activation
    tied_embeddings: bool
    rope_scaling: RopeScaling | None = None
    local_rope_base: float | None = None
    embedding_scale: float = 1.0

    @property
    def qkv_bias(self) -> bool:
        return self.architecture is Architecture.QWEN2

    @property
    def qk_norm(self) -> bool:
        """Each head's query and key are normed before they are rotated."""
        return self.architecture in (Architecture.QWEN3, Architecture.GEMMA3)

    @property
    def post_norms(self) -> bool:
        """What attention and feed-forward layer give is normed before it is added."""
        return self.architecture is Architecture.GEMMA3

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def check(self, source: str) -> None:
        """Raises WeightsError naming `source` for sizes that do not go together."""
        if self.num_heads % self.num_kv_heads:
            raise WeightsError(
                f"{source}: {self.num_heads} heads are no multiple of {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise WeightsError(f"{source}: the head dimension {self.head_dim} is odd: it cannot be rotated")
        if len(self.layer_windows) != self.num_layers:
            raise WeightsError(
                f"{source}: {len(self.layer_windows)} kinds given for {self.num_layers} layers"
            )
