"""Opens the weights of a decoder, by what their files are."""

import re
from pathlib import Path
from typing import Any

from workers.models import gguf_config, hugging_face_config
from workers.models.config_fields import ConfigFields
from workers.models.decoder_config import Architecture
from workers.models.decoder_weights import DecoderWeights
from workers.models.tensor_names import HuggingFaceNames
from workers.weights.errors import WeightsError
from workers.weights.gguf import GGUFFile
from workers.weights.safetensors import INDEX_SUFFIX, SafetensorsTensors
from workers.weights.strict_json import parse_json
from workers.weights.tensors import GGUFTensors


def open_weights(path: Path) -> DecoderWeights:
    """Opens the weights of a model by the name of their file: `*.gguf`, or `*.safetensors` or
    `*.safetensors.index.json` with config.json beside it.

    Raises WeightsError (GGUFError for GGUF files) for a file that is broken or of another kind, a config that
    is not implemented, and tensors that do not fit it, all before any of them is read; OSError for a file
    that cannot be opened.
    """
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix == ".safetensors" or path.name.endswith(INDEX_SUFFIX):
        return _open_safetensors(path)
    raise WeightsError(f"{path}: neither *.gguf nor *.safetensors nor *{INDEX_SUFFIX}")


def _open_gguf(path: Path) -> DecoderWeights:
    gguf = GGUFFile(path)
    try:
        config = gguf_config.decoder_config(gguf.metadata, gguf.tensors, str(path))
        return DecoderWeights(
            config,
            GGUFTensors(gguf),
            lambda name: name,
            layers_prefix="",
            interleaved_rotation=config.architecture is Architecture.LLAMA,
        )
    except BaseException:
        gguf.close()
        raise


def _open_safetensors(path: Path) -> DecoderWeights:
    source = path.with_name("config.json")
    values: Any = parse_json(source.read_bytes(), str(source))
    config = hugging_face_config.decoder_config(values, str(source))
    tensors = SafetensorsTensors(path, _fp8_blocks(ConfigFields(values, str(source))))
    try:
        names = HuggingFaceNames(config.architecture, tensors.names, str(path))
        weights = DecoderWeights(
            config, tensors, names, layers_prefix=f"{names.prefix}layers.", published_norms=True
        )
        vocab_size = (ConfigFields(values, str(source)).inner("text_config") or values).get("vocab_size")
        if vocab_size not in (None, weights.vocab_size):
            raise WeightsError(
                f"{source}: vocab_size: {vocab_size!r}, but the embedding has {weights.vocab_size} rows"
            )
        return weights
    except BaseException:
        tensors.close()
        raise


def _fp8_blocks(fields: ConfigFields) -> tuple[int, int] | None:
    """Rows and columns of a block of FP8 weights; None where they have no blocks, or are not quantized.

    Raises WeightsError for quantizations other than FP8.
    """
    quantization = fields.inner("quantization_config") or fields.inner("compression_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method == "fp8":
        quantization.refuse("fmt", "e4m3", "e5m2")
        return _block_shape(quantization, "weight_block_size")
    if method != "compressed-tensors":
        raise quantization.error("quant_method", "is not implemented (fp8 and compressed-tensors are)")
    shapes: set[tuple[int, int] | None] = set()
    groups = quantization.inner("config_groups")
    for name in groups.names if groups is not None else ():
        group = groups.inner(name) if groups is not None else None
        weights = group.inner("weights") if group is not None else None
        if weights is None:
            raise quantization.error("config_groups", f"has no 'weights' in {name!r}")
        weights.refuse("type", "float")
        weights.refuse("num_bits", 8)
        weights.refuse("strategy", "tensor", "channel", "block")
        shapes.add(_block_shape(weights, "block_structure"))
    shapes.discard(None)
    if len(shapes) > 1:
        raise quantization.error("config_groups", "asks for blocks of several shapes")
    return next(iter(shapes), None)


def _block_shape(fields: ConfigFields, name: str) -> tuple[int, int] | None:
    match fields.get(name):
        case None:
            return None
        case [int(rows), int(columns)] if min(rows, columns) > 0 and bool not in (type(rows), type(columns)):
            return rows, columns
        case str(text) if sides := re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text, re.ASCII):
            return int(sides[1]), int(sides[2])
    raise fields.error(name, "is not two positive integers")
