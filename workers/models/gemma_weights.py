"""Reads the weights of Gemma 3 text models from GGUF, a layer at a time, as fp32."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from workers.models.gemma_config import GemmaConfig
from workers.weights.gguf import GGUFError, GGUFFile

# Dequantizing an embedding of 262,144 rows takes 0.8 s of CPU in pieces, 1.7 at once (page faults).
_ROWS_AT_ONCE = 2048
_EMBEDDING = "token_embd.weight"


M = TypeVar("M")
N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class GemmaLayer(Generic[M]):
    """One layer with its matrices in some form; fp32 norms, which in GGUF already hold the "+ 1" of the
    published model."""

    sliding_window: int | None
    input_norm: Tensor  # [hidden_size], as are the other norms but for qk_norm
    qkv: M  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size]
    qk_norm: Tensor  # [num_heads + num_kv_heads, head_dim], the query's with the attention scale
    output: M  # [hidden_size, num_heads * head_dim]
    post_attention_norm: Tensor
    pre_feedforward_norm: Tensor
    gate_up: M  # [2 * intermediate_size, hidden_size]
    down: M  # [hidden_size, intermediate_size]
    post_feedforward_norm: Tensor

    def convert(self, form: Callable[[M], N]) -> "GemmaLayer[N]":
        """The layer with its matrices in another form."""
        return GemmaLayer(
            sliding_window=self.sliding_window,
            input_norm=self.input_norm,
            qkv=form(self.qkv),
            qk_norm=self.qk_norm,
            output=form(self.output),
            post_attention_norm=self.post_attention_norm,
            pre_feedforward_norm=self.pre_feedforward_norm,
            gate_up=form(self.gate_up),
            down=form(self.down),
            post_feedforward_norm=self.post_feedforward_norm,
        )


class GemmaWeights:
    """The weights in an open file. All methods raise GGUFError when a tensor is missing or has another shape
    than the metadata says."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.config = GemmaConfig.from_metadata(gguf.metadata)
        self._gguf = gguf
        self.vocab_size = gguf.info(_EMBEDDING).shape[0]

    def embedding(self, rows_at_once: int = _ROWS_AT_ONCE) -> Iterator[Tensor]:
        """[vocab_size, hidden_size] in pieces of rows; it is the output matrix too."""
        return self._rows(_EMBEDDING, self.vocab_size, self.config.hidden_size, rows_at_once)

    def final_norm(self) -> Tensor:
        """[hidden_size]."""
        return self._vector("output_norm.weight", self.config.hidden_size)

    def layer(self, index: int) -> GemmaLayer[Tensor]:
        """Layer `index`, from 0, its matrices in fp32."""
        config = self.config
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def norm(name: str, size: int = config.hidden_size) -> Tensor:
            return self._vector(f"blk.{index}.{name}.weight", size)

        def matrix(*parts: tuple[str, int], size: int = config.hidden_size) -> Tensor:
            return torch.cat(
                [
                    piece
                    for name, rows in parts
                    for piece in self._rows(f"blk.{index}.{name}.weight", rows, size, _ROWS_AT_ONCE)
                ]
            )

        query_norm = norm("attn_q_norm", config.head_dim) * config.head_dim**-0.5
        key_norm = norm("attn_k_norm", config.head_dim)
        return GemmaLayer(
            sliding_window=config.layer_window(index),
            input_norm=norm("attn_norm"),
            qkv=matrix(("attn_q", query_size), ("attn_k", kv_size), ("attn_v", kv_size)),
            qk_norm=torch.stack([query_norm] * config.num_heads + [key_norm] * config.num_kv_heads),
            output=matrix(("attn_output", config.hidden_size), size=query_size),
            post_attention_norm=norm("post_attention_norm"),
            pre_feedforward_norm=norm("ffn_norm"),
            gate_up=matrix(("ffn_gate", config.intermediate_size), ("ffn_up", config.intermediate_size)),
            down=matrix(("ffn_down", config.hidden_size), size=config.intermediate_size),
            post_feedforward_norm=norm("post_ffw_norm"),
        )

    def _vector(self, name: str, size: int) -> Tensor:
        values = self._gguf.dequantize(name)
        if values.shape != (size,):
            raise GGUFError(f"{self._gguf.path}: tensor {name!r}: shape {values.shape}, expected {(size,)}")
        return torch.from_numpy(values)

    def _rows(self, name: str, rows: int, columns: int, rows_at_once: int) -> Iterator[Tensor]:
        shape = self._gguf.info(name).shape
        if shape != (rows, columns):
            raise GGUFError(f"{self._gguf.path}: tensor {name!r}: shape {shape}, expected {(rows, columns)}")
        return map(torch.from_numpy, self._gguf.dequantize_rows(name, rows_at_once))
