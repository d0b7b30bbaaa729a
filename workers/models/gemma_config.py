"""Sizes of Gemma 3 text models (Gemma Team 2025), read from GGUF metadata.

Two things are not in every file: layers with a sliding window rotate positions with base 10,000, and every
sixth layer (the 6th, 12th, ...) attends globally.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from workers.weights.gguf import GGUFError, MetadataValue

ARCHITECTURE = "gemma3"

_LOCAL_ROPE_BASE = 10_000.0
_GLOBAL_EVERY = 6


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """Sizes of a Gemma 3 model, all in elements or counts."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int
    context_length: int
    rms_norm_epsilon: float
    rope_base: float
    local_rope_base: float

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, MetadataValue]) -> Self:
        """Raises GGUFError naming the key that is missing, of the wrong type, or asks for the unknown."""

        def integer(key: str) -> int:
            value = metadata.get(f"{ARCHITECTURE}.{key}")
            if type(value) is not int or value <= 0:
                raise GGUFError(f"metadata '{ARCHITECTURE}.{key}': {value!r} is not a positive integer")
            return value

        def real(key: str, default: float | None = None) -> float:
            value = metadata.get(f"{ARCHITECTURE}.{key}", default)
            if not isinstance(value, int | float) or value <= 0:
                raise GGUFError(f"metadata '{ARCHITECTURE}.{key}': {value!r} is not a positive number")
            return float(value)

        if metadata.get("general.architecture") != ARCHITECTURE:
            raise GGUFError(
                f"metadata 'general.architecture': {metadata.get('general.architecture')!r} is not "
                f"{ARCHITECTURE!r}"
            )
        for key in ("rope.scaling.type", "rope.scaling.factor", "final_logit_softcapping"):
            if f"{ARCHITECTURE}.{key}" in metadata:
                raise GGUFError(f"metadata '{ARCHITECTURE}.{key}' asks for what is not implemented")
        config = cls(
            num_layers=integer("block_count"),
            hidden_size=integer("embedding_length"),
            intermediate_size=integer("feed_forward_length"),
            num_heads=integer("attention.head_count"),
            num_kv_heads=integer("attention.head_count_kv"),
            head_dim=integer("attention.key_length"),
            sliding_window=integer("attention.sliding_window"),
            context_length=integer("context_length"),
            rms_norm_epsilon=real("attention.layer_norm_rms_epsilon"),
            rope_base=real("rope.freq_base"),
            local_rope_base=real("rope.freq_base_swa", _LOCAL_ROPE_BASE),
        )
        if config.num_heads % config.num_kv_heads:
            raise GGUFError(
                f"metadata '{ARCHITECTURE}.attention.head_count': {config.num_heads} is no multiple of "
                f"{config.num_kv_heads} KV heads"
            )
        return config

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens; None where it attends to all."""
        return None if (layer + 1) % _GLOBAL_EVERY == 0 else self.sliding_window
