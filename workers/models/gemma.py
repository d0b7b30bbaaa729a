"""Gemma 3 text models (Gemma Team 2025): forward over a paged KV cache, weights from GGUF.

Two things are not in every GGUF file: layers with a sliding window rotate positions with base 10,000, and
every sixth layer (the 6th, 12th, ...) attends globally. Norm weights in GGUF already hold the "+ 1".

The residual stream stays in fp32; matrices are multiplied in the weights' dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Self

import torch
from torch import Tensor

from kernels.gelu_and_mul_ref import gelu_and_mul_ref
from kernels.rms_norm_ref import rms_norm_ref
from kernels.rotary_embedding_ref import cos_sin_cache, rotary_embedding_ref
from workers.models.layers import Attention, Linear
from workers.weights.gguf import GGUFError, GGUFFile, MetadataValue

ARCHITECTURE = "gemma3"

_LOCAL_ROPE_BASE = 10_000.0
_GLOBAL_EVERY = 6
# Dequantizing an embedding of 262,144 rows takes 0.8 s of CPU in pieces, 1.7 at once (page faults).
_ROWS_AT_ONCE = 2048


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


@dataclass(frozen=True, slots=True)
class _Layer:
    sliding_window: int | None
    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor  # [num_heads + num_kv_heads, head_dim], the query's with the attention scale
    output: Linear
    post_attention_norm: Tensor
    pre_feedforward_norm: Tensor
    gate_up: Linear
    down: Linear
    post_feedforward_norm: Tensor


class GemmaModel:
    """A loaded model. Immutable: all state of requests is in the KV cache."""

    def __init__(self, gguf: GGUFFile, dtype: torch.dtype, max_model_len: int | None = None) -> None:
        """Dequantizes all weights to `dtype` (norms to fp32); `max_model_len` in tokens, at most the model's.

        Raises GGUFError when a tensor is missing or has another shape than the metadata says.
        """
        self.config = config = GemmaConfig.from_metadata(gguf.metadata)
        self.dtype = dtype
        self.max_model_len = min(max_model_len or config.context_length, config.context_length)

        def tensor(name: str, *shape: int) -> Tensor:
            values = gguf.dequantize(name)
            if values.shape != shape:
                raise GGUFError(f"{gguf.path}: tensor {name!r}: shape {values.shape}, expected {shape}")
            return torch.from_numpy(values)

        def matrix(name: str, rows: int, columns: int) -> Tensor:
            if (shape := gguf.info(name).shape) != (rows, columns):
                raise GGUFError(f"{gguf.path}: tensor {name!r}: shape {shape}, expected {(rows, columns)}")
            pieces = gguf.dequantize_rows(name, _ROWS_AT_ONCE)
            return torch.cat([torch.from_numpy(piece).to(dtype) for piece in pieces])

        def linear(layer: int, *parts: tuple[str, int], size: int) -> Linear:
            return Linear(
                torch.cat([matrix(f"blk.{layer}.{name}.weight", rows, size) for name, rows in parts])
            )

        def load_layer(layer: int) -> _Layer:
            def norm(name: str, size: int = config.hidden_size) -> Tensor:
                return tensor(f"blk.{layer}.{name}.weight", size)

            query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            query_norm = norm("attn_q_norm", config.head_dim) * config.head_dim**-0.5
            key_norm = norm("attn_k_norm", config.head_dim)
            return _Layer(
                sliding_window=config.layer_window(layer),
                input_norm=norm("attn_norm"),
                qkv=linear(
                    layer,
                    ("attn_q", query_size),
                    ("attn_k", kv_size),
                    ("attn_v", kv_size),
                    size=config.hidden_size,
                ),
                qk_norm=torch.stack([query_norm] * config.num_heads + [key_norm] * config.num_kv_heads),
                output=linear(layer, ("attn_output", config.hidden_size), size=query_size),
                post_attention_norm=norm("post_attention_norm"),
                pre_feedforward_norm=norm("ffn_norm"),
                gate_up=linear(
                    layer,
                    ("ffn_gate", config.intermediate_size),
                    ("ffn_up", config.intermediate_size),
                    size=config.hidden_size,
                ),
                down=linear(layer, ("ffn_down", config.hidden_size), size=config.intermediate_size),
                post_feedforward_norm=norm("post_ffw_norm"),
            )

        self.vocab_size = gguf.info("token_embd.weight").shape[0]
        self._embedding = matrix("token_embd.weight", self.vocab_size, config.hidden_size)
        # A copy in another layout: rows are looked up in the one and all rows multiplied in the other.
        self._lm_head = Linear(self._embedding, typical_rows=8)
        self._layers = [load_layer(layer) for layer in range(config.num_layers)]
        self._final_norm = tensor("output_norm.weight", config.hidden_size)
        self._cos_sin = {
            None: cos_sin_cache(config.rope_base, config.head_dim, self.max_model_len),
            config.sliding_window: cos_sin_cache(config.local_rope_base, config.head_dim, self.max_model_len),
        }

    @property
    def linears(self) -> list[Linear]:
        """One matrix of each shape that `forward` multiplies with."""
        by_shape = {
            (linear.out_features, linear.in_features): linear
            for layer in self._layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        }
        return list(by_shape.values())

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the last norm. token_ids, positions: int64 [num_tokens].

        Returns fp32 [num_tokens, hidden_size]. Raises IndexError for a token or position out of range.
        """
        config = self.config
        epsilon = config.rms_norm_epsilon
        split = config.num_heads + config.num_kv_heads
        cos_sin = {window: cache.index_select(0, positions) for window, cache in self._cos_sin.items()}
        # Implementations with a bf16 residual stream round sqrt(hidden_size) to it; fp32 needs no rounding.
        hidden = self._embedding.index_select(0, token_ids).to(torch.float32) * sqrt(config.hidden_size)
        for index, layer in enumerate(self._layers):
            window = layer.sliding_window
            qkv = layer.qkv(rms_norm_ref(hidden, layer.input_norm, epsilon))
            heads = qkv.view(len(hidden), -1, config.head_dim)
            qk, value = heads[:, :split].to(torch.float32), heads[:, split:]
            qk = rotary_embedding_ref(rms_norm_ref(qk, layer.qk_norm, epsilon), cos_sin[window])
            attended = attention(index, qk[:, : config.num_heads], qk[:, config.num_heads :], value, window)
            projected = layer.output(attended.flatten(1)).to(torch.float32)
            hidden = hidden + rms_norm_ref(projected, layer.post_attention_norm, epsilon)
            gate_up = layer.gate_up(rms_norm_ref(hidden, layer.pre_feedforward_norm, epsilon))
            down = layer.down(gelu_and_mul_ref(gate_up)).to(torch.float32)
            hidden = hidden + rms_norm_ref(down, layer.post_feedforward_norm, epsilon)
        return rms_norm_ref(hidden, self._final_norm, epsilon)

    @property
    def lm_head(self) -> Linear:
        """The output matrix, which is the embedding."""
        return self._lm_head

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden_size] from `forward`. Returns fp32 [num_rows, vocab_size]."""
        return self._lm_head(hidden).to(torch.float32)
