"""Gemma 3 text models for speed: the same mathematics as `decoder`, cut where a CPU wants it cut.

A layer is four matrix products with one compiled pass over the rows between each two of them. The residual
stream is fp32; what matrices take and give is quantized or bf16 (see `kernels.activations`).
"""

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor

from kernels.activations import Activations
from kernels.add_rms_norm import add_rms_norm
from kernels.attention_blocks import LANES
from kernels.gelu_and_mul_quantize import gelu_and_mul_quantize
from kernels.gemma_decode import DecodeLayer, GemmaDecode, GemmaSizes
from kernels.paged_attention_cpu import (
    PagedAttentionPlan,
    paged_attention_cpu,
    plan_decodes,
    plan_paged_attention,
)
from kernels.qk_norm_rope_cache import qk_norm_rope_cache
from kernels.quantize_rows import quantize_rows
from kernels.rescore_logits import rescore_logits
from workers.block_pool import BLOCK_SIZE
from workers.model_step import ModelStep
from workers.models.decoder_weights import DecoderWeights
from workers.models.embedding_table import BlockQuantizedTable, quantize_table
from workers.models.fast_linear import FastLinear, LinearKind, LinearKinds
from workers.models.gemma_layer import GemmaLayer
from workers.models.layers import KVCache
from workers.models.rope import cos_sin_caches

# Rows of the output matrix in one product: its result stays in the cache until it is scaled, and the memory
# of the last one is used again. In one piece, 32 rows of a vocabulary of 262,144 are 33 MB of page faults.
_VOCABULARY_PIECE = 32_768

# Chooses how matrices of a shape are multiplied: (out_features, in_features) to kinds.
ChooseKinds = Callable[[int, int], LinearKinds]


def gemma_shapes(weights: DecoderWeights) -> list[tuple[int, int]]:
    """The shapes (out_features, in_features) of all matrices that `FastGemmaModel` multiplies with."""
    config = weights.config
    vocabulary_pieces = {
        (min(_VOCABULARY_PIECE, weights.vocab_size - start), config.hidden_size)
        for start in range(0, weights.vocab_size, _VOCABULARY_PIECE)
    }
    return [
        (config.query_size + 2 * config.kv_size, config.hidden_size),
        (config.hidden_size, config.query_size),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
        *sorted(vocabulary_pieces),
    ]


class FastGemmaModel:
    """A loaded model. Immutable but for the buffer of the logits: for one thread."""

    def __init__(
        self, weights: DecoderWeights, choose_kinds: ChooseKinds, max_model_len: int | None = None
    ) -> None:
        """`max_model_len` in tokens, at most the model's.

        Raises WeightsError when a tensor cannot be decoded, ValueError for another architecture.
        """
        self.config = config = weights.config
        self.max_model_len = min(max_model_len or config.context_length, config.context_length)
        self.vocab_size = weights.vocab_size
        self._lm_head: list[FastLinear] = []
        values, scales = [], []
        for piece in weights.embedding(_VOCABULARY_PIECE):
            part = quantize_table(piece)
            values.append(part.values)
            scales.append(part.scales)
            kinds = choose_kinds(*piece.shape)
            self._lm_head.append(FastLinear(piece, kinds, rescored=True))
        self._embedding = BlockQuantizedTable(torch.cat(values), torch.cat(scales))

        def linear(weight: Tensor) -> FastLinear:
            return FastLinear(weight, choose_kinds(*weight.shape))

        self._layers = [GemmaLayer.of(weights.layer(index), linear) for index in range(config.num_layers)]
        self._final_norm = weights.final_norm()
        self._cos_sin = cos_sin_caches(config, self.max_model_len, weights.rope_factors())
        self._logits = torch.empty(0, self.vocab_size)
        self._decode = self._make_decode()

    def compute_logits(self, step: ModelStep, cache: KVCache, *, in_one_call: bool = True) -> Tensor:
        """Stores the KV of all tokens and computes the logits of the sequences that sample.

        Returns fp32 [sequences that sample, vocab_size], which the next call overwrites. Token ids, positions
        and slots must be in range: nobody checks them here. A batch of decodes is computed in one call where
        this machine can, or with `in_one_call` false in separate ones: bit for bit the same.
        """
        epsilon = self.config.rms_norm_epsilon
        num_sampled = len(step.sampled_rows)
        hidden = self._embedding.rows(step.token_ids).mul_(sqrt(self.config.hidden_size))
        if in_one_call and self._decode is not None and self._is_decode(step):
            logits = self._buffer(num_sampled)
            decodes = plan_decodes(step.block_tables, step.seq_lens)
            self._decode(
                hidden,
                step.positions,
                step.slot_mapping,
                decodes.block_tables,
                decodes.table_starts,
                decodes.seq_lens,
                cache.keys,
                cache.values,
                logits,
            )
            self._rescore(logits, hidden)
            return logits
        plans = self._plan(step)
        first, num_rows = self._layers[0], len(hidden)
        x = add_rms_norm(
            hidden, None, first.input_norm, first.input_norm, epsilon, first.qkv.input_format(num_rows)
        )
        for index, layer in enumerate(self._layers):
            keys, values = cache.keys[index], cache.values[index]
            query = qk_norm_rope_cache(
                layer.qkv(x),
                layer.qk_norm,
                self._cos_sin[layer.sliding_window],
                step.positions,
                step.slot_mapping,
                keys,
                values,
                epsilon,
            )
            if cache.on_stored is not None:
                cache.on_stored(index)
            attended = paged_attention_cpu(query, keys, values, plans[layer.sliding_window], scale=1.0)
            attended = attended.flatten(1)
            if layer is self._layers[-1]:
                # From here on only what is sampled is of use.
                attended, hidden = attended[step.sampled_rows], hidden[step.sampled_rows]
                num_rows = len(hidden)
                if not num_rows:
                    break
            branch = layer.output(quantize_rows(attended, layer.output.input_format(num_rows)))
            x = add_rms_norm(
                hidden,
                branch,
                layer.post_attention_norm,
                layer.pre_feedforward_norm,
                epsilon,
                layer.gate_up.input_format(num_rows),
            )
            activated = gelu_and_mul_quantize(layer.gate_up(x), layer.down.input_format(num_rows))
            next_norm, next_linear = self._after(index)
            x = add_rms_norm(
                hidden,
                layer.down(activated),
                layer.post_feedforward_norm,
                next_norm,
                epsilon,
                next_linear.input_format(num_rows),
            )
        logits = self._project(x, num_sampled)
        self._rescore(logits, hidden)
        return logits

    def _rescore(self, logits: Tensor, hidden: Tensor) -> None:
        """Makes the likely tokens' logits exact, from what the last layer left. Whatever the matrix was
        multiplied as, it was rounded: this table is what the weights say."""
        table = self._embedding
        epsilon = self.config.rms_norm_epsilon
        rescore_logits(logits, hidden, self._final_norm, epsilon, table.values, table.scales)

    def _is_decode(self, step: ModelStep) -> bool:
        """Whether `GemmaDecode` computes such a step, and fastest."""
        num_rows = len(step.seq_lens)
        return num_rows == len(step.token_ids) == len(step.sampled_rows) and all(
            linear.kind(num_rows) is LinearKind.INT8 for linear in self._linears
        )

    def _make_decode(self) -> GemmaDecode | None:
        """None where a matrix is multiplied in other ways only."""
        first = self._layers[0]
        self._linears = [first.qkv, first.output, first.gate_up, first.down, self._lm_head[0]]
        lm_head = [linear.panels for linear in self._lm_head if linear.panels is not None]
        layers = [self._decode_layer(index) for index in range(len(self._layers))]
        if len(lm_head) < len(self._lm_head) or self.config.head_dim % LANES:
            return None
        config = self.config
        sizes = GemmaSizes(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            vocab_size=self.vocab_size,
            epsilon=config.rms_norm_epsilon,
        )
        whole = [layer for layer in layers if layer is not None]
        if len(whole) < len(layers):
            return None
        return GemmaDecode(sizes, self._layers[0].input_norm, whole, lm_head)

    def _decode_layer(self, index: int) -> DecodeLayer | None:
        layer = self._layers[index]
        qkv, output = layer.qkv.blocks, layer.output.blocks
        gate_up, down = layer.gate_up.blocks, layer.down.blocks
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        return DecodeLayer(
            sliding_window=layer.sliding_window,
            cos_sin=self._cos_sin[layer.sliding_window],
            qkv=qkv,
            qk_norm=layer.qk_norm,
            output=output,
            post_attention_norm=layer.post_attention_norm,
            pre_feedforward_norm=layer.pre_feedforward_norm,
            gate_up=gate_up,
            down=down,
            post_feedforward_norm=layer.post_feedforward_norm,
            next_norm=self._after(index)[0],
        )

    def _buffer(self, num_rows: int) -> Tensor:
        """Where logits go: new memory in each step would be page faults in each step."""
        if len(self._logits) < num_rows:
            self._logits = torch.empty(num_rows, self.vocab_size)
        return self._logits[:num_rows]

    def _plan(self, step: ModelStep) -> dict[int | None, PagedAttentionPlan]:
        """One plan for each kind of layer, by its sliding window."""
        return {
            window: plan_paged_attention(
                step.block_tables, step.seq_lens, step.query_start_loc, BLOCK_SIZE, torch.bfloat16, window
            )
            for window in self._cos_sin
        }

    def _after(self, index: int) -> tuple[Tensor, FastLinear]:
        """The norm and the matrix that follow on layer `index`."""
        if index + 1 < len(self._layers):
            following = self._layers[index + 1]
            return following.input_norm, following.qkv
        return self._final_norm, self._lm_head[0]

    def _project(self, x: Activations, num_rows: int) -> Tensor:
        """All logits of normed rows."""
        logits = self._buffer(num_rows)
        if not num_rows:
            return logits
        scales = x.scales[:, None]
        start = 0
        for piece in self._lm_head:
            end = start + piece.out_features
            target = logits[:, start:end]
            product = piece(x, target)
            if product.values is not target:
                torch.mul(product.values, scales, out=target)
            start = end
        return logits
