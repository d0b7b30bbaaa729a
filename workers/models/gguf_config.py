"""The metadata of a GGUF file as a `DecoderConfig`.

Two things are not in every file of Gemma 3: layers with a sliding window rotate positions with base 10,000,
and every sixth layer (the 6th, 12th, ...) attends globally. Where a file says which, it is by another number,
or by an array that is true for each layer with a window.
"""

from collections.abc import Collection, Mapping

import numpy as np

from workers.models.config_fields import ConfigFields
from workers.models.decoder_config import (
    MOST_LAYERS,
    Activation,
    Architecture,
    DecoderConfig,
    LinearScaling,
    RopeScaling,
)
from workers.weights.gguf_cursor import GGUFError, MetadataValue

_GEMMA_LOCAL_ROPE_BASE = 10_000.0
_GEMMA_GLOBAL_EVERY = 6
# The 27B model alone scales queries by hidden_size / num_heads; it is known by its layers, as in llama.cpp.
_GEMMA_27B_LAYERS = 62


def decoder_config(
    metadata: Mapping[str, MetadataValue], tensor_names: Collection[str], source: str
) -> DecoderConfig:
    """Raises WeightsError naming the key that is missing, of the wrong type, or asks for the unknown."""
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise GGUFError(
            f"{source}: metadata 'split.count': one of {parts} files: join them (llama-gguf-split --merge)"
        )
    name = metadata.get("general.architecture")
    try:
        architecture = Architecture(name) if isinstance(name, str) else None
    except ValueError:
        architecture = None
    if architecture is None:
        known = ", ".join(Architecture)
        raise GGUFError(f"{source}: metadata 'general.architecture': {name!r} is not one of {known}")
    fields = ConfigFields(metadata, f"{source}: metadata", f"{architecture}.")
    gemma = architecture is Architecture.GEMMA3
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "attention.key_length_swa"):
        fields.refuse(key)
    fields.refuse("expert_count", 0)
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    num_layers = fields.integer("block_count", most=MOST_LAYERS)
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    fields.refuse("attention.value_length", head_dim)
    fields.refuse("rope.dimension_count", head_dim)
    by_27b = gemma and num_layers == _GEMMA_27B_LAYERS
    config = DecoderConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=fields.integer("context_length"),
        rms_norm_epsilon=fields.real("attention.layer_norm_rms_epsilon"),
        rope_base=fields.real("rope.freq_base", None if gemma else 10_000.0),
        layer_windows=_layer_windows(fields, num_layers, gemma),
        attention_scale=(hidden_size / num_heads if by_27b else head_dim) ** -0.5,
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        tied_embeddings="output.weight" not in tensor_names,
        rope_scaling=_scaling(fields),
        local_rope_base=fields.real("rope.freq_base_swa", _GEMMA_LOCAL_ROPE_BASE) if gemma else None,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
    )
    config.check(source)
    return config


def _layer_windows(fields: ConfigFields, num_layers: int, gemma: bool) -> tuple[int | None, ...]:
    if not gemma:
        fields.refuse("attention.sliding_window", 0)
        return (None,) * num_layers
    window = fields.integer("attention.sliding_window")
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and pattern.dtype == np.bool_:
        return tuple(window if slides else None for slides in pattern)
    every = fields.integer("attention.sliding_window_pattern", _GEMMA_GLOBAL_EVERY)
    return tuple(window if (layer + 1) % every else None for layer in range(num_layers))


def _scaling(fields: ConfigFields) -> RopeScaling | None:
    """Llama 3's is no metadata but a tensor, `rope_freqs`."""
    match fields.get("rope.scaling.type"):
        case "none":
            return None
        case None:
            # Files of before there was a type.
            fields.refuse("rope.scaling.factor")
            fields.refuse("rope.scale_linear", 1.0)
            return None
        case "linear":
            return LinearScaling(fields.real("rope.scaling.factor"))
    raise fields.error("rope.scaling.type", "is not implemented (none and linear are)")
