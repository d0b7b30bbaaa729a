"""A layer of Gemma 3 as `gemma_fast` takes it: where other decoders may lack a norm, it does not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from workers.models.decoder_weights import DecoderLayer

M = TypeVar("M")
N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class GemmaLayer(Generic[M]):
    """One layer with its matrices in some form; shapes as in `DecoderLayer`."""

    sliding_window: int | None
    input_norm: Tensor
    qkv: M
    qk_norm: Tensor
    output: M
    post_attention_norm: Tensor
    pre_feedforward_norm: Tensor
    gate_up: M
    down: M
    post_feedforward_norm: Tensor

    @classmethod
    def of(cls, layer: DecoderLayer[M], form: Callable[[M], N]) -> "GemmaLayer[N]":
        """With its matrices in another form. Raises ValueError for a layer of another architecture."""
        qk_norm = layer.qk_norm
        post_attention_norm, post_feedforward_norm = layer.post_attention_norm, layer.post_feedforward_norm
        if qk_norm is None or post_attention_norm is None or post_feedforward_norm is None:
            raise ValueError("a layer without the norms of Gemma 3")
        return GemmaLayer(
            sliding_window=layer.sliding_window,
            input_norm=layer.input_norm,
            qkv=form(layer.qkv),
            qk_norm=qk_norm,
            output=form(layer.output),
            post_attention_norm=post_attention_norm,
            pre_feedforward_norm=layer.pre_feedforward_norm,
            gate_up=form(layer.gate_up),
            down=form(layer.down),
            post_feedforward_norm=post_feedforward_norm,
        )
