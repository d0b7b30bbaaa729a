"""The config.json of Hugging Face's transformers, of versions 4 and 5, as a `DecoderConfig`."""

from collections.abc import Mapping

from workers.models.config_fields import ConfigFields
from workers.models.decoder_config import (
    MOST_LAYERS,
    Activation,
    Architecture,
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
)
from workers.weights.errors import WeightsError

_MODEL_TYPES = {
    "llama": Architecture.LLAMA,
    "qwen2": Architecture.QWEN2,
    "qwen3": Architecture.QWEN3,
    "gemma3": Architecture.GEMMA3,
    "gemma3_text": Architecture.GEMMA3,
}
# What Gemma's files leave out, transformers fills in so.
_GEMMA_DEFAULTS: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
}
_GEMMA_GLOBAL_EVERY = 6
_SLIDING, _FULL = "sliding_attention", "full_attention"


def decoder_config(values: object, source: str) -> DecoderConfig:
    """values: the parsed config.json named `source`.

    Raises WeightsError naming the field that is missing, of the wrong type, or asks for what is not
    implemented.
    """
    if not isinstance(values, Mapping):
        raise WeightsError(f"{source}: not an object")
    model_type = values.get("model_type")
    architecture = _MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        raise WeightsError(f"{source}: model_type: {model_type!r} is not one of {', '.join(_MODEL_TYPES)}")
    if architecture is Architecture.GEMMA3:
        text = values.get("text_config", values)
        if not isinstance(text, Mapping):
            raise WeightsError(f"{source}: text_config: not an object")
        values = _GEMMA_DEFAULTS | {name: value for name, value in text.items() if value is not None}
    config = _decoder_config(architecture, ConfigFields(values, source))
    config.check(source)
    return config


def _decoder_config(architecture: Architecture, fields: ConfigFields) -> DecoderConfig:
    gemma = architecture is Architecture.GEMMA3
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if not (name == "attention_bias" and architecture is Architecture.QWEN2):
            fields.refuse(name, False)
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "num_experts", "num_local_experts"):
        fields.refuse(name)
    fields.refuse("partial_rotary_factor", 1)
    activation_field = "hidden_activation" if gemma else "hidden_act"
    wanted = Activation.GELU_TANH if gemma else Activation.SILU
    fields.refuse(activation_field, wanted)

    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    head_dim = fields.integer(
        "head_dim", 128 if architecture is Architecture.QWEN3 else hidden_size // num_heads
    )
    rope_base, scaling, local_base = _rope(fields, gemma)
    return DecoderConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        context_length=fields.integer("max_position_embeddings"),
        rms_norm_epsilon=fields.real("rms_norm_eps", 1e-6),
        rope_base=rope_base,
        layer_windows=_layer_windows(fields, num_layers, gemma),
        attention_scale=(fields.real("query_pre_attn_scalar") if gemma else head_dim) ** -0.5,
        activation=wanted,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        rope_scaling=scaling,
        local_rope_base=local_base,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
    )


def _rope(fields: ConfigFields, gemma: bool) -> tuple[float, RopeScaling | None, float | None]:
    """Base and scaling of the layers that attend to all, and the base of Gemma's that do not."""
    parameters = fields.inner("rope_parameters")  # from version 5 on
    given = fields.inner("rope_scaling")
    if parameters is None:
        local_base = fields.real("rope_local_base_freq") if gemma else None
        return fields.real("rope_theta", 10_000.0), _scaling(given) if given else None, local_base
    local_base = None
    if gemma:
        local, parameters = parameters.inner(_SLIDING), parameters.inner(_FULL)
        if local is None or parameters is None:
            raise WeightsError(f"{fields.source}: rope_parameters: needs {_FULL!r} and {_SLIDING!r}")
        local.refuse("rope_type", "default")
        local.refuse("partial_rotary_factor", 1)
        local_base = local.real("rope_theta")
    parameters.refuse("partial_rotary_factor", 1)
    scaling = _scaling(parameters)
    if given is not None and _scaling(given) != scaling:
        raise fields.error("rope_scaling", "is another scaling than that of 'rope_parameters'")
    return parameters.real("rope_theta", 10_000.0), scaling, local_base


def _scaling(fields: ConfigFields) -> RopeScaling | None:
    name = "type" if fields.get("rope_type") is None else "rope_type"
    match fields.get(name):
        case "default":
            return None
        case None:
            fields.refuse("factor", 1)
            return None
        case "linear":
            return LinearScaling(fields.real("factor"))
        case "llama3":
            low, high = fields.real("low_freq_factor"), fields.real("high_freq_factor")
            if high <= low:
                raise fields.error("high_freq_factor", f"is not above low_freq_factor, which is {low:g}")
            return Llama3Scaling(
                factor=fields.real("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_context_length=fields.integer("original_max_position_embeddings"),
            )
    raise fields.error(name, "is not implemented (default, linear and llama3 are)")


def _layer_windows(fields: ConfigFields, num_layers: int, gemma: bool) -> tuple[int | None, ...]:
    kinds = fields.get("layer_types")
    if not gemma and not fields.flag("use_sliding_window", False):
        if kinds is not None and kinds != [_FULL] * num_layers:
            raise fields.error("layer_types", f"is not {num_layers} times {_FULL!r}: no window is used")
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    if kinds is None and gemma:
        # Since transformers 4.53 with an underscore.
        every = fields.integer(
            "_sliding_window_pattern", fields.integer("sliding_window_pattern", _GEMMA_GLOBAL_EVERY)
        )
        kinds = [_SLIDING if (layer + 1) % every else _FULL for layer in range(num_layers)]
    elif kinds is None:
        first = fields.integer("max_window_layers", least=0)
        kinds = [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]
    if not isinstance(kinds, list) or not all(kind in (_SLIDING, _FULL) for kind in kinds):
        raise fields.error("layer_types", f"is not a list of {_FULL!r} and {_SLIDING!r}")
    return tuple(window if kind == _SLIDING else None for kind in kinds)
