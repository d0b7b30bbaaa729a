"""The decoders that are served, operation by operation in plain torch: Llama, Qwen and Gemma.

In fp32 nothing here depends on the batch, which the deterministic mode is built on; nor on how many ranks the
pieces of the sharding are spread over. What is fast for Gemma on CPUs is in `gemma_fast`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gelu_and_mul_ref import gelu_and_mul_ref
from kernels.rms_norm_ref import rms_norm_ref
from kernels.rotary_embedding_ref import rotary_embedding_ref
from kernels.silu_and_mul_ref import silu_and_mul_ref
from workers.models.decoder_config import Activation
from workers.models.decoder_weights import DecoderLayer, DecoderWeights
from workers.models.layers import Attention, Linear
from workers.models.ranks import Ranks, SingleRank, embed
from workers.models.rope import cos_sin_caches
from workers.models.sharding import Sharding

_ACTIVATIONS = {Activation.SILU: silu_and_mul_ref, Activation.GELU_TANH: gelu_and_mul_ref}


class Decoder:
    """A loaded model, or a rank's part of one. Immutable: all state of requests is in the KV cache."""

    def __init__(
        self,
        weights: DecoderWeights,
        max_model_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        sharding: Sharding | None = None,
    ) -> None:
        """Converts all matrices to `dtype`; `max_model_len` in tokens, at most the model's.

        With a sharding over several ranks `ranks` must be set before anything is computed.

        Raises WeightsError when a tensor cannot be decoded.
        """
        self.config = config = weights.config
        self.dtype = dtype
        self.max_model_len = min(max_model_len or config.context_length, config.context_length)
        self.vocab_size = weights.vocab_size
        self.sharding = sharding or Sharding(config)
        self.ranks: Ranks = SingleRank()
        self._vocab = self.sharding.vocab(self.vocab_size)
        self._embedding = torch.cat([piece.to(dtype) for piece in weights.embedding(chosen=self._vocab)])
        if config.tied_embeddings:
            # A copy in another layout: rows are looked up in the one and all rows multiplied in the other.
            output = self._embedding
        else:
            output = torch.cat([piece.to(dtype) for piece in weights.output(chosen=self._vocab)])
        self._lm_head = self._output_pieces(output)
        self._layers = [self._layer(weights, index) for index in range(config.num_layers)]
        self._final_norm = weights.final_norm()
        self._cos_sin = cos_sin_caches(config, self.max_model_len, weights.rope_factors())
        self._activation = _ACTIVATIONS[config.activation]

    def _output_pieces(self, output: Tensor) -> list[Linear]:
        """The rank's part of the output matrix."""
        if self.sharding.num_pieces == 1:
            return [Linear(output, typical_rows=8)]
        size = self.sharding.vocab_piece_size(self.vocab_size)
        if missing := size * self.sharding.num_own_pieces - len(output):
            output = F.pad(output, (0, 0, 0, missing))
        return [Linear(piece, typical_rows=8) for piece in output.split(size)]

    def _layer(self, weights: DecoderWeights, index: int) -> DecoderLayer[list[Linear]]:
        sharding = self.sharding
        num_pieces = sharding.num_own_pieces

        def linears(pieces: Sequence[Tensor]) -> list[Linear]:
            return [Linear(piece.to(self.dtype).contiguous()) for piece in pieces]

        def qkv(weight: Tensor) -> list[Linear]:
            if sharding.num_pieces == sharding.num_ranks:
                return linears([weight])
            # By itself each KV head has one shape, whether the rank has all of them or one.
            query = [len(sharding.query_rows) // num_pieces] * num_pieces
            return linears(weight.split(query + [self.config.head_dim] * (2 * sharding.num_kv_heads)))

        def gate_up(weight: Tensor) -> list[Linear]:
            if num_pieces == 1:
                return linears([weight])
            gates, ups = weight.view(2, num_pieces, -1, weight.shape[1]).unbind()
            return linears([torch.cat(pair) for pair in zip(gates, ups, strict=True)])

        return weights.layer(index, sharding).convert(
            qkv=qkv, gate_up=gate_up, summed=lambda weight: linears(weight.chunk(num_pieces, dim=1))
        )

    @property
    def linears(self) -> list[Linear]:
        """One matrix of each shape that `forward` multiplies with."""
        by_shape = {
            (linear.out_features, linear.in_features): linear
            for layer in self._layers
            for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
            for linear in part
        }
        return list(by_shape.values())

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the last norm. token_ids, positions: int64 [num_tokens].

        Returns fp32 [num_tokens, hidden_size]. Raises IndexError for a token or position out of range.
        """
        epsilon = self.config.rms_norm_epsilon
        cos_sin = {window: cache.index_select(0, positions) for window, cache in self._cos_sin.items()}
        # Implementations with a bf16 residual stream round Gemma's scale to it; fp32 needs no rounding.
        embedded = embed(token_ids, self._embedding, self._vocab, self.vocab_size, self.ranks)
        hidden = embedded * self.config.embedding_scale
        for index, layer in enumerate(self._layers):
            query, key, value = self._qkv(layer, hidden, cos_sin[layer.sliding_window])
            attended = attention(index, query, key, value, layer.sliding_window)
            heads = attended.flatten(1).chunk(self.sharding.num_own_pieces, dim=1)
            projected = self.ranks.sum(
                [output(part.contiguous()) for output, part in zip(layer.output, heads, strict=True)]
            )
            if layer.post_attention_norm is not None:
                projected = rms_norm_ref(projected, layer.post_attention_norm, epsilon)
            hidden = hidden + projected
            normed = rms_norm_ref(hidden, layer.pre_feedforward_norm, epsilon)
            down = self.ranks.sum(
                [
                    down(self._activation(gate_up(normed)))
                    for gate_up, down in zip(layer.gate_up, layer.down, strict=True)
                ]
            )
            if layer.post_feedforward_norm is not None:
                down = rms_norm_ref(down, layer.post_feedforward_norm, epsilon)
            hidden = hidden + down
        return rms_norm_ref(hidden, self._final_norm, epsilon)

    def _qkv(
        self, layer: DecoderLayer[list[Linear]], hidden: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, scaled, and keys, both rotated, and values: [num_tokens, heads, head_dim] of `dtype`, of
        the rank's heads."""
        config, num_heads = self.config, self.sharding.num_heads
        normed = rms_norm_ref(hidden, layer.input_norm, config.rms_norm_epsilon)
        qkv = _side_by_side([part(normed) for part in layer.qkv])
        if layer.qkv_bias is not None:
            qkv = (qkv + layer.qkv_bias).to(self.dtype)
        heads = qkv.view(len(hidden), -1, config.head_dim)
        split = num_heads + self.sharding.num_kv_heads
        qk, value = heads[:, :split], heads[:, split:]
        if layer.qk_norm is not None:
            qk = rms_norm_ref(qk, layer.qk_norm, config.rms_norm_epsilon)
        qk = rotary_embedding_ref(qk, cos_sin)
        query, key = qk[:, :num_heads], qk[:, num_heads:]
        return query if layer.qk_norm is not None else query * config.attention_scale, key, value

    @property
    def lm_head(self) -> list[Linear]:
        """The output matrix, in pieces of one shape."""
        return self._lm_head

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden_size] from `forward`. Returns fp32 [num_rows, vocab_size]."""
        own = _side_by_side([piece(hidden) for piece in self._lm_head])
        return self.ranks.concat(own)[:, : self.vocab_size].float().contiguous()


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """[num_rows, ...]: the columns of all."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
