"""All layers of a Gemma 3 decode in one call: one token of each sequence, from embeddings to logits.

The work is a chain of phases, each a number of units that threads claim one after another. A phase begins
when all units of the one before are done; not when all threads have come. So a thread that the system has
taken off its core, or has not woken yet, holds nobody up: the others do its share. One call wakes the threads
once, where a call for each product and pass wakes them 150 times.

The same arithmetic, kernel by kernel, as `workers.models.gemma_fast` does in separate calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.activations import SLACK_ROWS, Format
from kernels.add_rms_norm import add_rms_norm_range
from kernels.gelu_and_mul_quantize import gelu_and_mul_range
from kernels.int8_matmul import UNIT, PanelWeights, amx_config, int8_matmul_range
from kernels.native import claim, compiled, int64s, wait_for
from kernels.paged_attention_decode import attend_sequence
from kernels.qk_norm_rope_cache import qk_norm_rope_cache_range
from kernels.quantize_rows import quantize_range
from kernels.team import TeamKernel, float_word

_PAIR = int(Format.ROTATED_INT8_PAIR)
_SINGLE = int(Format.ROTATED_INT8)

# A phase's counters, on cache lines of their own: the next unit, and behind _DONE bytes the units done.
_PHASE_BYTES = 128
_DONE = 64
_PHASES_OF_LAYER = 8
# Units of the output matrix in one claim: 160 KB of weights, 10 µs.
_LM_HEAD_STEP = 8

# Words of a call.
_NUM_ROWS, _COUNTERS, _LAYERS, _NUM_LAYERS, _HIDDEN_SIZE, _INTERMEDIATE_SIZE = range(6)
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, _EPSILON, _ONE, _AMX_CONFIG = range(6, 13)
_HIDDEN, _X, _X_SCALES, _Y, _QUERY, _ATTENDED = range(13, 19)
_POSITIONS, _SLOTS, _BLOCK_TABLES, _TABLE_STARTS, _SEQ_LENS = range(19, 24)
_PIECES, _NUM_PIECES, _LOGITS, _LOGITS_STRIDE, _FIRST_NORM = range(24, 29)
_NUM_WORDS = 29

# Words of a layer. A matrix has three: panels, scales, offsets.
_QKV, _OUTPUT, _GATE_UP, _DOWN = 0, 3, 6, 9
_QK_NORM, _COS_SIN, _WINDOW, _KEYS, _VALUES = range(12, 17)
_POST_ATTENTION, _PRE_FEEDFORWARD, _POST_FEEDFORWARD, _NEXT_NORM = range(17, 21)
_LAYER_WORDS = 21

# Words of a piece of the output matrix: its units, its matrix, its first column.
_PIECE_UNITS, _PIECE_MATRIX, _PIECE_START = 0, 1, 4
_PIECE_WORDS = 5


@compiled
def _product(unit: int, words: Any, layer: Any, matrix: int, in_features: int, out_features: int) -> None:
    int8_matmul_range(
        unit,
        unit + 1,
        words[_X],
        words[_X_SCALES],
        words[_NUM_ROWS],
        2,
        in_features,
        layer[matrix],
        layer[matrix + 1],
        layer[matrix + 2],
        words[_Y],
        out_features,
        words[_AMX_CONFIG],
    )


@compiled
def _norm(row: int, words: Any, branch: int, branch_weight: int, weight: int, form: int) -> None:
    add_rms_norm_range(
        row,
        row + 1,
        words[_NUM_ROWS],
        words[_HIDDEN],
        words[_HIDDEN_SIZE],
        branch,
        0,
        0,
        branch_weight,
        weight,
        words[_EPSILON],
        words[_X],
        words[_X_SCALES],
        form,
    )


@compiled
def _attend(row: int, words: Any, layer: Any) -> None:
    num_rows, num_heads, num_kv_heads, head_dim = (
        words[_NUM_ROWS],
        words[_NUM_HEADS],
        words[_NUM_KV_HEADS],
        words[_HEAD_DIM],
    )
    query_size = num_heads * head_dim
    qk_norm_rope_cache_range(
        row,
        row + 1,
        num_rows,
        words[_Y],
        0,
        0,
        layer[_QK_NORM],
        layer[_COS_SIN],
        words[_POSITIONS],
        words[_SLOTS],
        layer[_KEYS],
        layer[_VALUES],
        words[_EPSILON],
        num_heads,
        num_kv_heads,
        head_dim,
        words[_QUERY],
    )
    attend_sequence(
        words[_QUERY] + 2 * row * query_size,
        layer[_KEYS],
        layer[_VALUES],
        words[_BLOCK_TABLES] + 8 * int64s(words[_TABLE_STARTS], num_rows)[row],
        int64s(words[_SEQ_LENS], num_rows)[row],
        words[_ONE],
        layer[_WINDOW],
        num_heads,
        num_kv_heads,
        head_dim,
        words[_BLOCK_SIZE],
        words[_ATTENDED] + 2 * row * query_size,
    )
    quantize_range(
        row, row + 1, num_rows, words[_ATTENDED], 1, query_size, words[_X], words[_X_SCALES], _PAIR
    )


def _body(address: int) -> None:
    words = int64s(address, _NUM_WORDS)
    num_rows, num_layers = words[_NUM_ROWS], words[_NUM_LAYERS]
    hidden_size, intermediate_size = words[_HIDDEN_SIZE], words[_INTERMEDIATE_SIZE]
    query_size = words[_NUM_HEADS] * words[_HEAD_DIM]
    qkv_size = query_size + 2 * words[_NUM_KV_HEADS] * words[_HEAD_DIM]

    phase = words[_COUNTERS]
    unit = claim(phase, 1)
    while unit < num_rows:
        _norm(unit, words, 0, words[_FIRST_NORM], words[_FIRST_NORM], _PAIR)
        claim(phase + _DONE, 1)
        unit = claim(phase, 1)
    wait_for(phase + _DONE, num_rows)
    phase += _PHASE_BYTES

    for index in range(num_layers):
        layer = int64s(words[_LAYERS] + 8 * _LAYER_WORDS * index, _LAYER_WORDS)
        last_form = _SINGLE if index == num_layers - 1 else _PAIR
        for step in range(_PHASES_OF_LAYER):
            total = num_rows
            if step == 0:
                total = qkv_size // UNIT
            elif step in (2, 6):
                total = hidden_size // UNIT
            elif step == 4:
                total = 2 * intermediate_size // UNIT
            unit = claim(phase, 1)
            while unit < total:
                if step == 0:
                    _product(unit, words, layer, _QKV, hidden_size, qkv_size)
                elif step == 1:
                    _attend(unit, words, layer)
                elif step == 2:
                    _product(unit, words, layer, _OUTPUT, query_size, hidden_size)
                elif step == 3:
                    _norm(unit, words, words[_Y], layer[_POST_ATTENTION], layer[_PRE_FEEDFORWARD], _PAIR)
                elif step == 4:
                    _product(unit, words, layer, _GATE_UP, hidden_size, 2 * intermediate_size)
                elif step == 5:
                    gelu_and_mul_range(
                        unit,
                        unit + 1,
                        num_rows,
                        words[_Y],
                        0,
                        0,
                        intermediate_size,
                        words[_X],
                        words[_X_SCALES],
                        _PAIR,
                    )
                elif step == 6:
                    _product(unit, words, layer, _DOWN, intermediate_size, hidden_size)
                else:
                    _norm(unit, words, words[_Y], layer[_POST_FEEDFORWARD], layer[_NEXT_NORM], last_form)
                claim(phase + _DONE, 1)
                unit = claim(phase, 1)
            wait_for(phase + _DONE, total)
            phase += _PHASE_BYTES

    # Nothing reads the logits before all threads have left, so no phase waits here for another.
    for index in range(words[_NUM_PIECES]):
        piece = int64s(words[_PIECES] + 8 * _PIECE_WORDS * index, _PIECE_WORDS)
        unit = claim(phase, _LM_HEAD_STEP)
        while unit < piece[_PIECE_UNITS]:
            int8_matmul_range(
                unit,
                min(unit + _LM_HEAD_STEP, piece[_PIECE_UNITS]),
                words[_X],
                words[_X_SCALES],
                num_rows,
                1,
                hidden_size,
                piece[_PIECE_MATRIX],
                piece[_PIECE_MATRIX + 1],
                piece[_PIECE_MATRIX + 2],
                words[_LOGITS] + 4 * piece[_PIECE_START],
                words[_LOGITS_STRIDE],
                words[_AMX_CONFIG],
            )
            unit = claim(phase, _LM_HEAD_STEP)
        phase += _PHASE_BYTES


_kernel = TeamKernel(_body)


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
    qkv: PanelWeights
    qk_norm: Tensor
    output: PanelWeights
    post_attention_norm: Tensor
    pre_feedforward_norm: Tensor
    gate_up: PanelWeights
    down: PanelWeights
    post_feedforward_norm: Tensor
    next_norm: Tensor


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
        self._first_norm, self._layers, self._lm_head = first_norm, list(layers), list(lm_head)
        self._layer_words = np.zeros((len(layers), _LAYER_WORDS), np.int64)
        starts = np.cumsum([0, *(piece.out_features for piece in lm_head)])
        self._pieces = np.array(
            [
                (piece.out_features // UNIT, *_matrix(piece), start)
                for piece, start in zip(lm_head, starts, strict=False)
            ],
            np.int64,
        )
        num_phases = 1 + len(layers) * _PHASES_OF_LAYER + len(lm_head)
        self._counters = np.zeros(num_phases * _PHASE_BYTES // 8, np.int64)
        self._caches = (0, 0)
        self._reserve(1)

    def _reserve(self, num_rows: int) -> None:
        sizes = self._sizes
        query_size = sizes.num_heads * sizes.head_dim
        widest = max(sizes.hidden_size, query_size, sizes.intermediate_size)
        product = max(query_size + 2 * sizes.num_kv_heads * sizes.head_dim, 2 * sizes.intermediate_size)
        self._max_rows = num_rows
        self._x = torch.zeros(2 * num_rows + SLACK_ROWS, widest, dtype=torch.uint8)
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
        if (caches := (keys.data_ptr(), values.data_ptr())) != self._caches:
            for index, layer in enumerate(self._layers):
                self._layer_words[index] = _words_of(layer, keys[index], values[index])
            self._caches = caches
        self._counters.fill(0)
        _kernel(
            (
                num_rows,
                self._counters.ctypes.data,
                self._layer_words.ctypes.data,
                len(self._layers),
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
            )
        )


def _matrix(weights: PanelWeights) -> tuple[int, int, int]:
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
