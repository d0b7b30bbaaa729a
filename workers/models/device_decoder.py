"""The decoders that are served, by the kernels of a GPU: Llama, Qwen and Gemma.

The same layers as in `decoder`, whose plain operations say what is right. What matrices take and give is in
the dtype of the weights, the residual stream in fp32. Where what a layer adds to it and the norm behind that
are neighbours, they are one kernel.
"""

import torch
from torch import Tensor

from kernels.dispatch import Operations
from workers.models.decoder_config import Activation
from workers.models.decoder_weights import DecoderLayer, DecoderWeights
from workers.models.device_linear import DeviceLinear, device_linear
from workers.models.layers import Attention
from workers.models.ranks import Ranks, SingleRank, embed
from workers.models.rope import cos_sin_caches
from workers.models.sharding import Sharding
from workers.weights.fp8 import Fp8Matrix


class DeviceDecoder:
    """A loaded model, or a rank's part of one. Immutable: all state of requests is in the KV cache."""

    def __init__(
        self,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        operations: Operations,
        sharding: Sharding,
        max_model_len: int | None = None,
        *,
        keep_fp8: bool = True,
    ) -> None:
        """Loads a layer at a time. `max_model_len` in tokens, at most the model's; `keep_fp8`: matrices that
        are stored in FP8 stay so.

        With a sharding over several ranks `ranks` must be set before anything is computed.

        Raises WeightsError when a tensor cannot be decoded.
        """
        self.config = config = weights.config
        self.dtype = dtype
        self.device = device
        self.max_model_len = min(max_model_len or config.context_length, config.context_length)
        self.vocab_size = weights.vocab_size
        self.sharding = sharding
        self.operations = operations
        self.ranks: Ranks = SingleRank()
        self._vocab = sharding.vocab(self.vocab_size)
        self._embedding = torch.cat([piece.to(dtype) for piece in weights.embedding(chosen=self._vocab)]).to(
            device
        )
        self._lm_head = self._embedding if config.tied_embeddings else self._output(weights)
        self._layers = [self._layer(weights, index, keep_fp8) for index in range(config.num_layers)]
        self._final_norm = weights.final_norm().to(device)
        self._cos_sin = {
            window: cache.to(device)
            for window, cache in cos_sin_caches(config, self.max_model_len, weights.rope_factors()).items()
        }
        silu = config.activation is Activation.SILU
        self._activation = operations.silu_and_mul if silu else operations.gelu_and_mul

    def _output(self, weights: DecoderWeights) -> Tensor:
        return torch.cat([piece.to(self.dtype) for piece in weights.output(chosen=self._vocab)]).to(
            self.device
        )

    def _layer(self, weights: DecoderWeights, index: int, keep_fp8: bool) -> DecoderLayer[DeviceLinear]:
        stored = weights.stored_layer(index, self.sharding, self.dtype, keep_fp8=keep_fp8)

        def norm(weight: Tensor | None) -> Tensor | None:
            return None if weight is None else weight.to(self.device)

        def linear(matrix: Tensor | Fp8Matrix, bias: Tensor | None = None) -> DeviceLinear:
            return device_linear(matrix, self.device, self.dtype, self.operations.fp8_matmul, bias)

        return DecoderLayer(
            sliding_window=stored.sliding_window,
            input_norm=stored.input_norm.to(self.device),
            qkv=linear(stored.qkv, stored.qkv_bias),
            qkv_bias=None,  # the matrix adds it
            qk_norm=norm(stored.qk_norm),
            output=linear(stored.output),
            post_attention_norm=norm(stored.post_attention_norm),
            pre_feedforward_norm=stored.pre_feedforward_norm.to(self.device),
            gate_up=linear(stored.gate_up),
            down=linear(stored.down),
            post_feedforward_norm=norm(stored.post_feedforward_norm),
        )

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the last norm. token_ids, positions: int64 [num_tokens], not checked.

        Returns [num_tokens, hidden_size] in `dtype`.
        """
        config, operations = self.config, self.operations
        epsilon = config.rms_norm_epsilon
        cos_sin = {window: cache.index_select(0, positions) for window, cache in self._cos_sin.items()}
        embedded = embed(token_ids, self._embedding, self._vocab, self.vocab_size, self.ranks)
        residual = embedded * config.embedding_scale
        normed = operations.rms_norm(residual, self._layers[0].input_norm, epsilon).to(self.dtype)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            query, key, value = self._qkv(layer, normed, cos_sin[layer.sliding_window])
            attended = attention(index, query, key, value, layer.sliding_window)
            added = self.ranks.reduce(layer.output(attended.flatten(1)))
            if layer.post_attention_norm is not None:
                added = operations.rms_norm(added, layer.post_attention_norm, epsilon)
            normed = operations.fused_add_rms_norm(added, residual, layer.pre_feedforward_norm, epsilon)
            added = self.ranks.reduce(layer.down(self._activation(layer.gate_up(normed))))
            if layer.post_feedforward_norm is not None:
                added = operations.rms_norm(added, layer.post_feedforward_norm, epsilon)
            normed = operations.fused_add_rms_norm(added, residual, next_norm, epsilon)
        return normed

    def _qkv(
        self, layer: DecoderLayer[DeviceLinear], normed: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, both rotated, and values: [num_tokens, heads, head_dim], of the rank's heads."""
        config, num_heads = self.config, self.sharding.num_heads
        heads = layer.qkv(normed).view(len(normed), -1, config.head_dim)
        split = num_heads + self.sharding.num_kv_heads
        qk, value = heads[:, :split], heads[:, split:]
        if layer.qk_norm is not None:
            qk = self.operations.rms_norm(qk, layer.qk_norm, config.rms_norm_epsilon)
        qk = self.operations.rotary_embedding(qk, cos_sin)
        return qk[:, :num_heads], qk[:, num_heads:], value

    @property
    def attention_scale(self) -> float:
        """What is left to multiply scores with: norms of queries hold the scale already."""
        return 1.0 if self.config.qk_norm else self.config.attention_scale

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden_size] from `forward`. Returns fp32 [num_rows, vocab_size]."""
        own = torch.nn.functional.linear(hidden, self._lm_head)
        if missing := self.sharding.vocab_piece_size(self.vocab_size) - own.shape[1]:
            own = torch.nn.functional.pad(own, (0, missing))
        return self.ranks.concat(own)[:, : self.vocab_size].float().contiguous()
