"""The weights of a decoder in open files, read a layer at a time as fp32, whatever the format."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from workers.models.decoder_config import Architecture, DecoderConfig
from workers.models.sharding import Sharding
from workers.models.tensor_names import (
    EMBEDDING,
    OUTPUT,
    OUTPUT_NORM,
    ROPE_FACTORS,
    in_layer,
)
from workers.models.tensor_shapes import tensor_shapes
from workers.weights.closing import Closing
from workers.weights.errors import WeightsError
from workers.weights.fp8 import Fp8Matrix, stacked
from workers.weights.safetensors import scale_names
from workers.weights.tensors import Tensors

# Dequantizing an embedding of 262,144 rows takes 0.8 s of CPU in pieces, 1.7 at once (page faults).
_ROWS_AT_ONCE = 2048

M = TypeVar("M")
N = TypeVar("N")

_Parts = dict[str, tuple[range, range | None]]
"""Of a matrix: tensors by our names, of which rows are taken and, where not all, columns."""


@dataclass(frozen=True, slots=True)
class DecoderLayer(Generic[M]):
    """One layer, or a rank's part of it, with its matrices in some form. Norms and biases are fp32; norms are
    multiplied with as they are (Gemma's published ones want 1 added, which has been done).

    Shapes are of the whole layer; a rank has its share of the heads and of `intermediate_size`.
    """

    sliding_window: int | None
    input_norm: Tensor  # [hidden_size], as are the other norms but for qk_norm
    qkv: M  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size]
    qkv_bias: Tensor | None  # [(num_heads + 2 num_kv_heads) * head_dim]
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], the query's with the attention scale
    output: M  # [hidden_size, num_heads * head_dim]
    post_attention_norm: Tensor | None
    pre_feedforward_norm: Tensor
    gate_up: M  # [2 * intermediate_size, hidden_size]
    down: M  # [hidden_size, intermediate_size]
    post_feedforward_norm: Tensor | None

    def convert(
        self, *, qkv: Callable[[M], N], gate_up: Callable[[M], N], summed: Callable[[M], N]
    ) -> "DecoderLayer[N]":
        """The layer with its matrices in another form; `summed` is for `output` and `down`."""
        return DecoderLayer(
            sliding_window=self.sliding_window,
            input_norm=self.input_norm,
            qkv=qkv(self.qkv),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            output=summed(self.output),
            post_attention_norm=self.post_attention_norm,
            pre_feedforward_norm=self.pre_feedforward_norm,
            gate_up=gate_up(self.gate_up),
            down=summed(self.down),
            post_feedforward_norm=self.post_feedforward_norm,
        )


class DecoderWeights(Closing):
    """Use as a context manager. Methods raise WeightsError for values that cannot be decoded."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Tensors,
        file_name: Callable[[str], str],
        *,
        layers_prefix: str,
        published_norms: bool = False,
        interleaved_rotation: bool = False,
    ) -> None:
        """`file_name` turns our name of a tensor into the file's; the names that begin with `layers_prefix`
        must all be known. `published_norms`: Gemma's, to which 1 is to be added. `interleaved_rotation`: rows
        of queries and keys are in the order in which neighbours are rotated against each other.

        Raises WeightsError for a tensor that is missing, is not known, cannot be decoded, or has another
        shape than the config says. No tensor is read.
        """
        self.config = config
        self.path = tensors.path
        self._tensors = tensors
        self._file_name = file_name
        self._add_to_norms = 1.0 if published_norms and config.architecture is Architecture.GEMMA3 else 0.0
        self._interleaved = interleaved_rotation
        embedding = tensors.shape(file_name(EMBEDDING))
        self.vocab_size = embedding[0] if embedding else 0
        if not self.vocab_size:
            raise WeightsError(f"{self.path}: tensor {file_name(EMBEDDING)!r}: shape {embedding} has no rows")
        self.shapes = dict(tensor_shapes(config, self.vocab_size))
        if ROPE_FACTORS in tensors.names:
            self.shapes[ROPE_FACTORS] = (config.head_dim // 2,)
        self._check(layers_prefix)

    def _check(self, layers_prefix: str) -> None:
        known = {
            self._file_name(name) if name != ROPE_FACTORS else name: shape
            for name, shape in self.shapes.items()
        }
        for name, expected in known.items():
            if (shape := self._tensors.shape(name)) != expected:
                raise WeightsError(f"{self.path}: tensor {name!r}: shape {shape}, expected {expected}")
            self._tensors.check(name)
        scales = {scale for name in known for scale in scale_names(name)}
        for name in self._tensors.names:
            ours = name in known or name in scales or name.endswith((".inv_freq", ".input_scale"))
            if name.startswith(layers_prefix) and not ours:
                raise WeightsError(
                    f"{self.path}: tensor {name!r}: {self.config.architecture} has none of that name: it "
                    "would be ignored"
                )

    @property
    def is_fp8(self) -> bool:
        """Whether the matrices of its layers are stored so."""
        name = in_layer(0, "attn_q")
        return self._fp8(name, range(1), None) is not None

    def embedding(self, rows_at_once: int = _ROWS_AT_ONCE, chosen: range | None = None) -> Iterator[Tensor]:
        """[vocab_size, hidden_size], or the chosen rows of it, in pieces of rows."""
        return self._rows(EMBEDDING, rows_at_once, chosen)

    def output(self, rows_at_once: int = _ROWS_AT_ONCE, chosen: range | None = None) -> Iterator[Tensor]:
        """The output matrix, as `embedding`; tied, it is the embedding."""
        return self._rows(EMBEDDING if self.config.tied_embeddings else OUTPUT, rows_at_once, chosen)

    def final_norm(self) -> Tensor:
        """[hidden_size]."""
        return self._norm(OUTPUT_NORM)

    def rope_factors(self) -> Tensor | None:
        """What the rotary frequencies are divided by, [head_dim / 2], where a GGUF file says it."""
        return self._tensors.vector(ROPE_FACTORS) if ROPE_FACTORS in self.shapes else None

    def layer(self, index: int, sharding: Sharding | None = None) -> DecoderLayer[Tensor]:
        """Layer `index`, from 0, its matrices in fp32: the whole, or what a rank has of it."""
        return self._layer(index, sharding, lambda parts: self._matrix(parts, torch.float32))

    def stored_layer(
        self, index: int, sharding: Sharding | None, dtype: torch.dtype, *, keep_fp8: bool
    ) -> DecoderLayer[Tensor | Fp8Matrix]:
        """As `layer`, its matrices in `dtype`; with `keep_fp8` in FP8, those that are stored so."""

        def matrix(parts: _Parts) -> Tensor | Fp8Matrix:
            kept = stacked([self._fp8(name, *part) for name, part in parts.items()]) if keep_fp8 else None
            return self._matrix(parts, dtype) if kept is None else kept

        return self._layer(index, sharding, matrix)

    def _layer(self, index: int, sharding: Sharding | None, matrix: Callable[[_Parts], M]) -> DecoderLayer[M]:
        config = self.config
        shard = sharding or Sharding(config)
        query_rows, kv_rows, gate_rows = shard.query_rows, shard.kv_rows, shard.intermediate
        hidden = range(config.hidden_size)

        def norm(part: str) -> Tensor:
            return self._norm(in_layer(index, part))

        def rows(parts: dict[str, range]) -> M:
            return matrix({in_layer(index, part): (chosen, None) for part, chosen in parts.items()})

        def columns(part: str, chosen: range) -> M:
            return matrix({in_layer(index, part): (hidden, chosen)})

        qkv_rows = {"attn_q": query_rows, "attn_k": kv_rows, "attn_v": kv_rows}
        qk_norm = bias = None
        if config.qk_norm:
            # The norm's weight would be multiplied with the scale for every token anew.
            query_norm, key_norm = norm("attn_q_norm") * config.attention_scale, norm("attn_k_norm")
            qk_norm = torch.stack([query_norm] * shard.num_heads + [key_norm] * shard.num_kv_heads)
        if config.qkv_bias:
            bias = torch.cat(
                [
                    self._vector(in_layer(index, part, "bias"))[chosen.start : chosen.stop]
                    for part, chosen in qkv_rows.items()
                ]
            )
        return DecoderLayer(
            sliding_window=config.layer_windows[index],
            input_norm=norm("attn_norm"),
            qkv=rows(qkv_rows),
            qkv_bias=bias,
            qk_norm=qk_norm,
            output=columns("attn_output", query_rows),
            post_attention_norm=norm("post_attention_norm") if config.post_norms else None,
            pre_feedforward_norm=norm("ffn_norm"),
            gate_up=rows({"ffn_gate": gate_rows, "ffn_up": gate_rows}),
            down=columns("ffn_down", gate_rows),
            post_feedforward_norm=norm("post_ffw_norm") if config.post_norms else None,
        )

    def _matrix(self, parts: _Parts, dtype: torch.dtype) -> Tensor:
        """The parts' rows one after another."""
        return torch.cat([self._part(name, *part, dtype) for name, part in parts.items()])

    def _part(self, name: str, rows: range, columns: range | None, dtype: torch.dtype) -> Tensor:
        kept = slice(None) if columns is None else slice(columns.start, columns.stop)
        pieces = self._rows(name, _ROWS_AT_ONCE, rows, dtype)
        part = torch.cat([piece[:, kept] for piece in pieces])
        if self._interleaved and name.split(".")[-2] in ("attn_q", "attn_k"):
            return halves_apart(part, self.config.head_dim)
        return part

    def _fp8(self, name: str, rows: range, columns: range | None) -> Fp8Matrix | None:
        # Only GGUF files are interleaved, and they have no FP8.
        return self._tensors.fp8(self._file_name(name), rows, columns)

    def _norm(self, name: str) -> Tensor:
        return self._vector(name) + self._add_to_norms

    def _vector(self, name: str) -> Tensor:
        return self._tensors.vector(self._file_name(name))

    def _rows(
        self,
        name: str,
        rows_at_once: int,
        chosen: range | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[Tensor]:
        return self._tensors.rows(self._file_name(name), rows_at_once, chosen, dtype)

    def close(self) -> None:
        self._tensors.close()


def halves_apart(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of queries or keys, [num_heads * head_dim, size], reordered so that what rotates against each
    other, which were neighbours, is half a head apart: undoes what llama.cpp's converter does to Llama."""
    heads = rows.view(-1, head_dim // 2, 2, rows.shape[1])
    return heads.transpose(1, 2).reshape(rows.shape)
