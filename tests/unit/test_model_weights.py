"""Files that cannot be served: each is refused by name before a tensor is read."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from tests.decoder_files import CONFIGS, Array, make_tensors, write_gguf, write_safetensors
from workers.models.decoder_config import LinearScaling
from workers.models.hugging_face_config import decoder_config
from workers.models.open_weights import open_weights
from workers.weights.errors import WeightsError

DOWN = "model.layers.2.mlp.down_proj.weight"
TENSORS = {family: make_tensors(config) for family, config in CONFIGS.items()}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"model_type": "mixtral"}, "model_type: 'mixtral' is not one of llama, qwen2, qwen3"),
        ("llama", {"model_type": ["llama"]}, "model_type"),
        ("llama", {"hidden_size": None}, "hidden_size: missing"),
        ("llama", {"hidden_size": "64"}, "hidden_size: '64' is not a positive integer"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers: True is not a positive integer"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps: -1 is not a positive number"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings: 1 is neither true nor false"),
        ("llama", {"num_key_value_heads": 3}, "4 heads are no multiple of 3 KV heads"),
        ("llama", {"head_dim": 17}, "head dimension 17 is odd"),
        ("llama", {"attention_bias": True}, "attention_bias: True asks for what is not implemented"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu' asks for"),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4}},
            "in 'rope_scaling': type: 'yarn' is not impl",
        ),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor: missing"),
        ("llama", {"rope_scaling": 8}, "rope_scaling: 8 is not an object"),
        ("qwen2", {"use_sliding_window": True}, "sliding_window: missing"),
        ("qwen3", {"num_experts": 8}, "num_experts: 8 asks for"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"layer_types": ["full_attention"]}, "1 kinds given for 3 layers"),
        ("gemma3", {"layer_types": ["chunked"] * 3}, "layer_types: .* is not a list of"),
        (
            "gemma3",
            {"rope_parameters": {"rope_theta": 1.0}},
            "needs 'full_attention' and 'sliding_attention'",
        ),
        ("llama", {"rms_norm_eps": math.inf}, "rms_norm_eps: inf is not a positive number"),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers: 1000000000000 is more than 1024"),
        ("llama", {"max_position_embeddings": 10**30}, "max_position_embeddings: 10+ is more than"),
        ("llama", {"num_attention_heads": 128}, "head_dim: 0 is not a positive integer"),
        ("llama", {"rope_scaling": {"factor": 8.0}}, "in 'rope_scaling': factor: 8.0 asks for what is not"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type: 'dynamic' is not impl",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": math.inf}},
            "factor: inf is not a positive",
        ),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "high_freq_factor: 4 is not above low_freq_factor, which is 4",
        ),
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "rope_type: 'yarn' is not implemented",
        ),
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "linear", "factor": 4}},
            "rope_scaling: .* is another scaling than that of 'rope_parameters'",
        ),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope_type: 'yarn' is not impl"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types: .* is not 3 times 'full_attention'",
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "max_window_layers: missing"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quant_method: 'awq' is not implemented"),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": "0x0"}},
            "weight_block_size: '0x0' is not two positive integers",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [True, True]}},
            r"weight_block_size: \[True, True\] is not two positive integers",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            r"weight_block_size: \[128\] is not two positive integers",
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_with_its_field(
    tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    path = write_safetensors(tmp_path, CONFIGS[family] | change, TENSORS[family])
    with pytest.raises(WeightsError, match=rf"config\.json.*{message}"):
        open_weights(path)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"num_hidden_layers": 4}, r"tensor 'model\.layers\.3\..*': not in the file"),
        ("llama", {"num_hidden_layers": 2}, r"tensor 'model\.layers\.2\..*': llama has none of that name"),
        (
            "llama",
            {"intermediate_size": 100},
            r"mlp\.gate_proj\.weight': shape \(96, 64\), expected \(100, 64\)",
        ),
        ("llama", {"tie_word_embeddings": True}, None),
        ("llama", {"model_type": "qwen2"}, r"q_proj\.bias': not in the file"),
        ("qwen2", {"model_type": "llama"}, r"q_proj\.bias': llama has none of that name"),
        ("qwen2", {"tie_word_embeddings": False}, r"tensor 'lm_head\.weight': not in the file"),
        ("qwen3", {"model_type": "llama"}, r"[qk]_norm\.weight': llama has none of that name"),
    ],
)
def test_tensors_that_are_not_what_the_config_says_are_named(
    tmp_path: Path, family: str, change: dict[str, Any], message: str | None
) -> None:
    path = write_safetensors(tmp_path, CONFIGS[family] | change, TENSORS[family])
    if message is None:  # an output matrix beside tied embeddings is what some files have
        open_weights(path).close()
        return
    with pytest.raises(WeightsError, match=message):
        open_weights(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 100_000, "not JSON: maximum recursion"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"model_type": "llama", "model_type": "qwen2"}', "'model_type' is given twice"),
        (b'{"model_type": "llama", "rope_scaling": {"factor": 1, "factor": 8}}', "'factor' is given twice"),
        (b"[]", "not an object"),
    ],
)
def test_a_config_that_is_not_plain_json_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = write_safetensors(tmp_path, CONFIGS["llama"], TENSORS["llama"])
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(WeightsError, match=rf"config\.json: {message}"):
        open_weights(path)


@pytest.mark.parametrize(
    ("first", "windows"), [(0, (8, 8, 8)), (1, (None, 8, 8)), (3, (None, None, None)), (28, (None,) * 3)]
)
def test_qwen_has_windows_from_a_layer_on(first: int, windows: tuple[int | None, ...]) -> None:
    change = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": first}
    assert decoder_config(CONFIGS["qwen2"] | change, "f").layer_windows == windows


def test_a_scaling_may_be_given_in_both_forms() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    change = {"rope_parameters": scaling | {"rope_theta": 5e5}, "rope_scaling": scaling}
    config = decoder_config(CONFIGS["qwen3"] | change, "f")
    assert (config.rope_scaling, config.rope_base) == (LinearScaling(2.0), 5e5)


@pytest.mark.parametrize("name", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma_may_attend_to_all_in_another_layer_than_each_sixth(name: str) -> None:
    config = decoder_config(CONFIGS["gemma3"] | {"layer_types": None, name: 2}, "f")
    assert config.layer_windows == (24, None, 24)


def test_gguf_may_say_of_each_layer_whether_it_has_a_window(tmp_path: Path) -> None:
    def write(key: str, pattern: list[Any] | int, name: str) -> Path:
        def add(writer: GGUFWriter) -> None:
            if isinstance(pattern, list):
                writer.add_array(f"gemma3.attention.{key}", pattern)
            else:
                writer.add_uint32(f"gemma3.attention.{key}", pattern)

        return write_gguf(tmp_path / name, CONFIGS["gemma3"], TENSORS["gemma3"], add=add)

    for pattern in ([True, False, True], 2):
        with open_weights(write("sliding_window_pattern", pattern, f"{pattern!s:.1}.gguf")) as weights:
            assert weights.config.layer_windows == (24, None, 24)
    with pytest.raises(WeightsError, match="2 kinds given for 3 layers"):
        open_weights(write("sliding_window_pattern", [True, False], "short.gguf"))
    with pytest.raises(WeightsError, match=r"sliding_window_pattern: .* is not a positive integer"):
        open_weights(write("sliding_window_pattern", [1.0, 2.0], "other.gguf"))
    with pytest.raises(WeightsError, match=r"value_length: .* asks for what is not implemented"):
        open_weights(write("value_length", [16, 32], "values.gguf"))


def test_an_embedding_without_rows_is_refused(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIGS["qwen2"].items() if name != "vocab_size"}
    tensors = TENSORS["qwen2"] | {"model.embed_tokens.weight": np.zeros((0, 64), np.float32)}
    with pytest.raises(WeightsError, match=r"embed_tokens\.weight': shape \(0, 64\) has no rows"):
        open_weights(write_safetensors(tmp_path, config, tensors))


def test_a_vocabulary_that_is_not_the_embeddings_is_refused(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path, CONFIGS["llama"] | {"vocab_size": 321}, TENSORS["llama"])
    with pytest.raises(WeightsError, match=r"vocab_size: 321.*320"):
        open_weights(path)


@pytest.mark.parametrize("name", ["model.bin", "pytorch_model.bin.index.json", "model"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsError, match=rf"{name}: neither"):
        open_weights(tmp_path / name)


@pytest.mark.parametrize(("model_type", "name"), [("mamba", "mamba"), ("gemma2", "gemma2")])
def test_an_unknown_architecture_in_gguf_is_refused(tmp_path: Path, model_type: str, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIGS["qwen3"] | {"model_type": model_type}, TENSORS["qwen3"])
    with pytest.raises(WeightsError, match=f"general.architecture': '{name}' is not one of llama"):
        open_weights(path)


def test_a_part_of_a_split_gguf_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m-00001-of-00003.gguf",
        CONFIGS["llama"],
        TENSORS["llama"],
        add=lambda writer: writer.add_uint16("split.count", 3),
    )
    with pytest.raises(WeightsError, match=r"'split\.count': one of 3 files: join them"):
        open_weights(path)


def change_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text("{"), "not JSON"),
        (lambda path: path.write_text("{}"), "'weight_map' is not an object"),
        (lambda path: path.write_text("[" * 100_000), "not JSON: maximum recursion"),
        (lambda path: path.write_text('{"weight_map": {"a": "b", "a": "c"}}'), "'a' is given twice"),
        (change_index(lambda i: i["weight_map"].update(x="../m.safetensors")), "'../m.*' is not a file name"),
        (change_index(lambda i: i["weight_map"].update(x="gone.safetensors")), "gone.safetensors is missing"),
        (
            change_index(lambda i: i["weight_map"].update(x="model-00001-of-00002.safetensors")),
            "tensor 'x' is not in model-00001-of-00002",
        ),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = write_safetensors(tmp_path, CONFIGS["llama"], TENSORS["llama"], 2)
    damage(path)
    with pytest.raises(WeightsError, match=message):
        open_weights(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({DOWN: np.zeros((64, 96), np.uint8)}, "FP8 without"),
        (
            {DOWN: np.zeros((64, 96), np.uint8), f"{DOWN}_scale": np.ones((7, 3), np.float32)},
            r"shape \(7, 3\) fits neither",
        ),
        ({"model.norm.weight": np.zeros(64, np.uint8)}, r"shape \(64,\) is not a matrix"),
    ],
)
def test_fp8_that_cannot_be_decoded_is_found_before_anything_is_read(
    tmp_path: Path, changes: dict[str, Array], message: str
) -> None:
    path = write_safetensors(tmp_path, CONFIGS["llama"], TENSORS["llama"] | changes)
    with pytest.raises(WeightsError, match=message):
        open_weights(path)


def test_a_gguf_tensor_that_cannot_be_decoded_is_found_before_anything_is_read(tmp_path: Path) -> None:
    tensors = {name: array for name, array in TENSORS["llama"].items() if name != DOWN}

    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.2.ffn_down.weight", np.zeros((64, 96), np.int32))

    path = write_gguf(tmp_path / "m.gguf", CONFIGS["llama"], tensors, add=add)
    with pytest.raises(WeightsError, match=r"'blk\.2\.ffn_down\.weight': no dequantizer for I32"):
        open_weights(path)


def test_gemmas_config_with_little_in_it_is_filled_in() -> None:
    """As the published file of the 4B model, with its vision tower, has it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = decoder_config({"model_type": "gemma3", "text_config": text}, "f")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert [i for i, window in enumerate(config.layer_windows) if window is None] == [5, 11, 17, 23, 29]
    assert (config.rope_base, config.local_rope_base, config.tied_embeddings) == (1e6, 1e4, True)
