"""All layers of a Gemma 3 decode in one call: one token of each sequence, from embeddings to logits.

One call wakes the threads once, where a call for each product and pass wakes them 150 times. The same
arithmetic, kernel by kernel, as `workers.models.gemma_fast` does in separate calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.activations import SLACK_ROWS
from kernels.block_int8_matmul import BlockPanelWeights, input_format
from kernels.gemma_phases import LAYER_WORDS, PHASE_BYTES, PHASES_OF_LAYER, run_phases
from kernels.int8_matmul import UNIT, PanelWeights, amx_config
from kernels.team import TeamKernel, float_word

_kernel = TeamKernel(run_phases)


@dataclass(frozen=True, slots=True)
class GemmaSizes:
    """Of a model, in elements or counts."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    vocab_size: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class DecodeLayer:
    """Weights of a layer; norms are fp32. cos_sin: fp32 [max_positions, 2, head_dim / 2]."""

    sliding_window: int | None
    cos_sin: Tensor
    qkv: BlockPanelWeights
    qk_norm: Tensor
    output: BlockPanelWeights
    post_attention_norm: Tensor
    pre_feedforward_norm: Tensor
    gate_up: BlockPanelWeights
    down: BlockPanelWeights
    post_feedforward_norm: Tensor
    next_norm: Tensor


class LayerTable:
    """Where the weights and the KV of each layer lie: int64 [num_layers, LAYER_WORDS], for `run_phases`."""

    def __init__(self, layers: Sequence[DecodeLayer]) -> None:
        self._layers = list(layers)
        self.words = np.zeros((len(layers), LAYER_WORDS), np.int64)
        self._caches = (0, 0, 0, 0)

    def with_caches(self, keys: Tensor, values: Tensor) -> npt.NDArray[np.int64]:
        """The table for these caches, shaped as for `GemmaDecode`; made anew only when they are others."""
        # A pool that is freed and allocated in another size may lie at the same address: the place of each
        # layer in it is another all the same.
        caches = (keys.data_ptr(), keys.stride(0), values.data_ptr(), values.stride(0))
        if caches != self._caches:
            for index, layer in enumerate(self._layers):
                self.words[index] = _words_of(layer, keys[index], values[index])
            self._caches = caches
        return self.words


class GemmaDecode:
    """The layers of a model and the buffers of a decode. For one thread at a time."""

    def __init__(
        self,
        sizes: GemmaSizes,
        first_norm: Tensor,
        layers: Sequence[DecodeLayer],
        lm_head: Sequence[PanelWeights],
    ) -> None:
        """`lm_head`: the output matrix in pieces of rows."""
        self._sizes = sizes
        # These own the memory whose addresses the tables hold.
        self._first_norm, self._lm_head = first_norm, list(lm_head)
        self._layers = LayerTable(layers)
        starts = np.cumsum([0, *(piece.out_features for piece in lm_head)])
        self._pieces = np.array(
            [
                (piece.out_features // UNIT, *_matrix(piece), start)
                for piece, start in zip(lm_head, starts, strict=False)
            ],
            np.int64,
        )
        num_phases = 1 + len(layers) * PHASES_OF_LAYER + len(lm_head)
        self._counters = np.zeros(num_phases * PHASE_BYTES // 8, np.int64)
        self._reserve(1)

    def _reserve(self, num_rows: int) -> None:
        sizes = self._sizes
        query_size = sizes.num_heads * sizes.head_dim
        widest = max(sizes.hidden_size, query_size, sizes.intermediate_size)
        product = max(query_size + 2 * sizes.num_kv_heads * sizes.head_dim, 2 * sizes.intermediate_size)
        self._max_rows = num_rows
        # Of two bytes for each value, in any format.
        self._x = torch.zeros(2 * (num_rows + SLACK_ROWS), widest, dtype=torch.uint8)
        self._x_scales = torch.zeros(num_rows)
        self._y = torch.zeros(num_rows, max(product, sizes.hidden_size))
        self._query = torch.zeros(num_rows, query_size, dtype=torch.bfloat16)
        self._attended = torch.zeros(num_rows, query_size, dtype=torch.bfloat16)

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        table_starts: Tensor,
        seq_lens: Tensor,
        keys: Tensor,
        values: Tensor,
        logits: Tensor,
    ) -> None:
        """Stores the new tokens' KV and fills `logits`, fp32 [num_rows, vocab_size].

        hidden: fp32 [num_rows, hidden_size], the embeddings, which it changes; keys, values: bf16
        [num_layers, num_blocks, block_size, num_kv_heads, head_dim]; the others int64, row i belonging to
        sequence i, as for `paged_attention_decode` and `qk_norm_rope_cache`. Nothing is checked.
        """
        sizes = self._sizes
        num_rows = hidden.shape[0]
        if num_rows > self._max_rows:
            self._reserve(num_rows)
        self._counters.fill(0)
        _kernel(
            (
                num_rows,
                self._counters.ctypes.data,
                self._layers.with_caches(keys, values).ctypes.data,
                len(self._layers.words),
                sizes.hidden_size,
                sizes.intermediate_size,
                sizes.num_heads,
                sizes.num_kv_heads,
                sizes.head_dim,
                sizes.block_size,
                float_word(sizes.epsilon),
                float_word(1.0),
                amx_config(),
                hidden.data_ptr(),
                self._x.data_ptr(),
                self._x_scales.data_ptr(),
                self._y.data_ptr(),
                self._query.data_ptr(),
                self._attended.data_ptr(),
                positions.data_ptr(),
                slot_mapping.data_ptr(),
                block_tables.data_ptr(),
                table_starts.data_ptr(),
                seq_lens.data_ptr(),
                self._pieces.ctypes.data,
                len(self._lm_head),
                logits.data_ptr(),
                logits.stride(0),
                self._first_norm.data_ptr(),
                input_format(num_rows),
            )
        )


def _matrix(weights: PanelWeights | BlockPanelWeights) -> tuple[int, int, int]:
    return weights.panels.data_ptr(), weights.scales.data_ptr(), weights.offsets.data_ptr()


def _words_of(layer: DecodeLayer, keys: Tensor, values: Tensor) -> list[int]:
    return [
        *_matrix(layer.qkv),
        *_matrix(layer.output),
        *_matrix(layer.gate_up),
        *_matrix(layer.down),
        layer.qk_norm.data_ptr(),
        layer.cos_sin.data_ptr(),
        layer.sliding_window or 0,
        keys.data_ptr(),
        values.data_ptr(),
        layer.post_attention_norm.data_ptr(),
        layer.pre_feedforward_norm.data_ptr(),
        layer.post_feedforward_norm.data_ptr(),
        layer.next_norm.data_ptr(),
    ]
