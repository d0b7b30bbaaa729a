"""The phases of a Gemma 3 decode: a chain of units of work that threads claim one after another.

A phase begins when all units of the one before are done; not when all threads have come. So a thread that the
system has taken off its core, or has not woken yet, holds nobody up: the others do its share.
"""

from typing import Any

from kernels.activations import Format
from kernels.add_rms_norm import add_rms_norm_range
from kernels.block_int8_matmul import block_int8_matmul_range
from kernels.gelu_and_mul_quantize import gelu_and_mul_range
from kernels.int8_matmul import UNIT, int8_matmul_range
from kernels.native import claim, compiled, int64s, wait_for
from kernels.paged_attention_decode import attend_sequence
from kernels.qk_norm_rope_cache import qk_norm_rope_cache_range
from kernels.quantize_rows import quantize_range

_BF16 = int(Format.BF16)
_LAST_FORM = int(Format.ROTATED_INT8)

# A phase's counters, on cache lines of their own: the next unit, and behind _DONE bytes the units done.
PHASE_BYTES = 128
_DONE = 64
PHASES_OF_LAYER = 8
# Units of the output matrix in one claim: 160 KB of weights, 10 µs.
_LM_HEAD_STEP = 8

# Words of a call.
_NUM_ROWS, _COUNTERS, _LAYERS, _NUM_LAYERS, _HIDDEN_SIZE, _INTERMEDIATE_SIZE = range(6)
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, _EPSILON, _ONE, _AMX_CONFIG = range(6, 13)
_HIDDEN, _X, _X_SCALES, _Y, _QUERY, _ATTENDED = range(13, 19)
_POSITIONS, _SLOTS, _BLOCK_TABLES, _TABLE_STARTS, _SEQ_LENS = range(19, 24)
_PIECES, _NUM_PIECES, _LOGITS, _LOGITS_STRIDE, _FIRST_NORM, _FORM = range(24, 30)
_NUM_WORDS = 30

# Words of a layer. A matrix has three: panels, scales, offsets.
_QKV, _OUTPUT, _GATE_UP, _DOWN = 0, 3, 6, 9
_QK_NORM, _COS_SIN, _WINDOW, _KEYS, _VALUES = range(12, 17)
_POST_ATTENTION, _PRE_FEEDFORWARD, _POST_FEEDFORWARD, _NEXT_NORM = range(17, 21)
LAYER_WORDS = 21

# Words of a piece of the output matrix: its units, its matrix, its first column.
_PIECE_UNITS, _PIECE_MATRIX, _PIECE_START = 0, 1, 4
_PIECE_WORDS = 5


@compiled
def _product(unit: int, words: Any, layer: Any, matrix: int, in_features: int, out_features: int) -> None:
    block_int8_matmul_range(
        unit,
        unit + 1,
        words[_X],
        words[_X_SCALES],
        words[_NUM_ROWS],
        words[_FORM] == _BF16,
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
        row, row + 1, num_rows, words[_ATTENDED], 1, query_size, words[_X], words[_X_SCALES], words[_FORM]
    )


def run_phases(address: int) -> None:
    """What each thread runs. address: of the words of a call."""
    words = int64s(address, _NUM_WORDS)
    num_rows, num_layers = words[_NUM_ROWS], words[_NUM_LAYERS]
    hidden_size, intermediate_size = words[_HIDDEN_SIZE], words[_INTERMEDIATE_SIZE]
    query_size = words[_NUM_HEADS] * words[_HEAD_DIM]
    qkv_size = query_size + 2 * words[_NUM_KV_HEADS] * words[_HEAD_DIM]
    form = words[_FORM]

    phase = words[_COUNTERS]
    unit = claim(phase, 1)
    while unit < num_rows:
        _norm(unit, words, 0, words[_FIRST_NORM], words[_FIRST_NORM], form)
        claim(phase + _DONE, 1)
        unit = claim(phase, 1)
    wait_for(phase + _DONE, num_rows)
    phase += PHASE_BYTES

    for index in range(num_layers):
        layer = int64s(words[_LAYERS] + 8 * LAYER_WORDS * index, LAYER_WORDS)
        last_form = _LAST_FORM if index == num_layers - 1 else form
        for step in range(PHASES_OF_LAYER):
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
                    _norm(unit, words, words[_Y], layer[_POST_ATTENTION], layer[_PRE_FEEDFORWARD], form)
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
                        form,
                    )
                elif step == 6:
                    _product(unit, words, layer, _DOWN, intermediate_size, hidden_size)
                else:
                    _norm(unit, words, words[_Y], layer[_POST_FEEDFORWARD], layer[_NEXT_NORM], last_form)
                claim(phase + _DONE, 1)
                unit = claim(phase, 1)
            wait_for(phase + _DONE, total)
            phase += PHASE_BYTES

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
                hidden_size,
                piece[_PIECE_MATRIX],
                piece[_PIECE_MATRIX + 1],
                piece[_PIECE_MATRIX + 2],
                words[_LOGITS] + 4 * piece[_PIECE_START],
                words[_LOGITS_STRIDE],
                words[_AMX_CONFIG],
            )
            unit = claim(phase, _LM_HEAD_STEP)
        phase += PHASE_BYTES
