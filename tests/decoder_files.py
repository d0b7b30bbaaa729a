"""Small models of each family with random weights, made from a seed alone, as the files that people have.

Nothing of them is stored: what `make_tensors` draws is the same on every machine, so that logits recorded for
them elsewhere can be compared here. Names and shapes are those of Hugging Face's checkpoints.
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize

Array = npt.NDArray[Any]

VOCAB_SIZE = 320
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
_LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# As config.json has them: Llama's in the form of transformers 4, the others' in that of version 5.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "llama3", **_LLAMA3_SCALING},
        "tie_word_embeddings": False,
    },
    "qwen2": _COMMON
    | {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
    "qwen3": _COMMON
    | {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "head_dim": 32,  # more than hidden_size / heads
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
    },
    "gemma3": _COMMON
    | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
        "tie_word_embeddings": True,
    },
}


def make_tensors(config: Mapping[str, Any], seed: int = 9) -> dict[str, Array]:
    """fp32 by Hugging Face's names; large enough that every part shows in the logits."""
    random = np.random.default_rng(seed)
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    query = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    gemma = config["model_type"] == "gemma3_text"

    def normal(*shape: int) -> Array:
        values: Array = (random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        return values

    def norm(size: int) -> Array:
        return (random.standard_normal(size) * 0.3 + (0.0 if gemma else 1.0)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden) * np.float32(4)}
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if gemma:
            norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
        if gemma or config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}{name}.weight": normal(*shape) * np.float32(1.5) for name, shape in shapes.items()
        }
        tensors |= {f"{prefix}{name}.weight": norm(size) for name, size in norms.items()}
        if config["model_type"] == "qwen2":
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                tensors[f"{prefix}{name}.bias"] = normal(shapes[name][0]) * np.float32(4)
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden)
    return tensors


def make_prompt(length: int = 90, seed: int = 5) -> list[int]:
    """Token ids; longer than Gemma's sliding window above and than Llama's first context length."""
    ids: list[int] = np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()
    return ids


_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "F8_E4M3"}


def safetensors_bytes(tensors: Mapping[str, Array]) -> bytes:
    """A file of them. uint16 stands for the bits of BF16 and uint8 for those of F8_E4M3."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values())


def write_safetensors(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], num_shards: int = 1
) -> Path:
    """config.json and the weights, in shards with an index where they are several. Returns what is opened."""
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        path = folder / "model.safetensors"
        path.write_bytes(safetensors_bytes(tensors))
        return path
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in [*tensors][shard::num_shards]}
        (folder / name).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, name)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_GGUF_PARTS = _GGUF_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Array],
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    add: Callable[[GGUFWriter], object] = lambda writer: None,
) -> Path:
    """As llama.cpp's converter writes them; matrices in `quantization`, where the gguf package can. `add`
    puts in more metadata."""
    architecture = {"gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    parts = _GEMMA_GGUF_PARTS if architecture == "gemma3" else _GGUF_PARTS
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters", config)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
    add(writer)
    if "rope_scaling" in config:
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config["rope_theta"], head_dim))
    for name, array in tensors.items():
        ours = _GGUF_NAMES.get(name)
        if ours is None:
            _, _, layer, part = name.split(".", 3)
            part, _, kind = part.rpartition(".")
            ours = f"blk.{layer}.{parts[part]}.{kind}"
        if architecture == "gemma3" and ours.endswith("norm.weight"):
            array = array + np.float32(1)
        if architecture == "llama" and ours.endswith(("attn_q.weight", "attn_k.weight")):
            heads = array.reshape(-1, 2, head_dim // 2, array.shape[1])
            array = heads.swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 2 and quantization is not GGMLQuantizationType.F32:
            writer.add_tensor(ours, quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(ours, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama3_factors(base: float, head_dim: int) -> Array:
    """As llama.cpp's converter computes `rope_freqs` (Llama 3.1's scaling)."""
    factor, original = _LLAMA3_SCALING["factor"], _LLAMA3_SCALING["original_max_position_embeddings"]
    low, high = _LLAMA3_SCALING["low_freq_factor"], _LLAMA3_SCALING["high_freq_factor"]
    factors = []
    for frequency in 1.0 / base ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim):
        wave_length = 2 * np.pi / frequency
        if wave_length < original / high:
            factors.append(1.0)
        elif wave_length > original / low:
            factors.append(factor)
        else:
            smooth = (original / wave_length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
