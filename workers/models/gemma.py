"""Gemma 3 text models (Gemma Team 2025) in fp32, operation by operation: the deterministic mode.

Nothing here depends on the batch; what is fast is in `gemma_fast`.
"""

from math import sqrt

import torch
from torch import Tensor

from kernels.gelu_and_mul_ref import gelu_and_mul_ref
from kernels.rms_norm_ref import rms_norm_ref
from kernels.rotary_embedding_ref import cos_sin_cache, rotary_embedding_ref
from workers.models.gemma_weights import GemmaWeights
from workers.models.layers import Attention, Linear


class GemmaModel:
    """A loaded model. Immutable: all state of requests is in the KV cache."""

    def __init__(self, weights: GemmaWeights, max_model_len: int | None = None) -> None:
        """Dequantizes all weights to fp32; `max_model_len` in tokens, at most the model's.

        Raises GGUFError when a tensor is missing or has another shape than the metadata says.
        """
        self.config = config = weights.config
        self.max_model_len = min(max_model_len or config.context_length, config.context_length)
        self.vocab_size = weights.vocab_size
        self._embedding = torch.cat(list(weights.embedding()))
        # A copy in another layout: rows are looked up in the one and all rows multiplied in the other.
        self._lm_head = Linear(self._embedding, typical_rows=8)
        self._layers = [weights.layer(index).convert(Linear) for index in range(config.num_layers)]
        self._final_norm = weights.final_norm()
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
        hidden = self._embedding.index_select(0, token_ids) * sqrt(config.hidden_size)
        for index, layer in enumerate(self._layers):
            window = layer.sliding_window
            qkv = layer.qkv(rms_norm_ref(hidden, layer.input_norm, epsilon))
            heads = qkv.view(len(hidden), -1, config.head_dim)
            qk, value = heads[:, :split], heads[:, split:]
            qk = rotary_embedding_ref(rms_norm_ref(qk, layer.qk_norm, epsilon), cos_sin[window])
            attended = attention(index, qk[:, : config.num_heads], qk[:, config.num_heads :], value, window)
            projected = layer.output(attended.flatten(1))
            hidden = hidden + rms_norm_ref(projected, layer.post_attention_norm, epsilon)
            gate_up = layer.gate_up(rms_norm_ref(hidden, layer.pre_feedforward_norm, epsilon))
            down = layer.down(gelu_and_mul_ref(gate_up))
            hidden = hidden + rms_norm_ref(down, layer.post_feedforward_norm, epsilon)
        return rms_norm_ref(hidden, self._final_norm, epsilon)

    @property
    def lm_head(self) -> Linear:
        """The output matrix, which is the embedding."""
        return self._lm_head

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden_size] from `forward`. Returns fp32 [num_rows, vocab_size]."""
        return self._lm_head(hidden)
