"""What the tensors of a decoder are called: in this code as in GGUF files, and in Hugging Face's."""

from collections.abc import Iterable

from workers.models.decoder_config import Architecture
from workers.weights.errors import WeightsError

EMBEDDING, OUTPUT, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
ROPE_FACTORS = "rope_freqs.weight"

_HUGGING_FACE_EMBEDDING = "embed_tokens.weight"
_IN_EVERY_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_GEMMA_LAYERS = _IN_EVERY_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def in_layer(index: int, part: str, kind: str = "weight") -> str:
    """The name of a layer's tensor, as `blk.0.attn_q.weight`."""
    return f"blk.{index}.{part}.{kind}"


class HuggingFaceNames:
    """From our names to those of a file of transformers' making."""

    def __init__(self, architecture: Architecture, names: Iterable[str], source: str) -> None:
        """names: all in the file. Raises WeightsError where not just one is an embedding's."""
        found = [name for name in names if name.endswith(_HUGGING_FACE_EMBEDDING)]
        if len(found) != 1:
            raise WeightsError(
                f"{source}: {len(found)} tensors end in {_HUGGING_FACE_EMBEDDING!r}, one was expected"
            )
        # "model.", or where there is a vision tower "language_model.model." or "model.language_model.".
        self.prefix = found[0].removesuffix(_HUGGING_FACE_EMBEDDING)
        self._parts = _IN_GEMMA_LAYERS if architecture is Architecture.GEMMA3 else _IN_EVERY_LAYER

    def __call__(self, name: str) -> str:
        if name == EMBEDDING:
            return self.prefix + _HUGGING_FACE_EMBEDDING
        if name == OUTPUT_NORM:
            return self.prefix + "norm.weight"
        if name == OUTPUT:
            return self.prefix.removesuffix("model.") + "lm_head.weight"
        _, layer, part, kind = name.split(".")
        return f"{self.prefix}layers.{layer}.{self._parts[part]}.{kind}"
