"""The tokenizer that a GGUF file's metadata describes, whichever of the known kinds it is."""

from collections.abc import Mapping

from tokenizers import Tokenizer

from infra.local.bpe_tokenizer import build_bpe_tokenizer
from infra.local.spm_tokenizer import build_spm_tokenizer
from workers.weights.gguf_cursor import GGUFError, MetadataValue

_BUILDERS = {"llama": build_spm_tokenizer, "gpt2": build_bpe_tokenizer}


def build_tokenizer(metadata: Mapping[str, MetadataValue]) -> Tokenizer:
    """Raises GGUFError naming the key that is missing or not known."""
    kind = metadata.get("tokenizer.ggml.model")
    build = _BUILDERS.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise GGUFError(
            f"metadata 'tokenizer.ggml.model': {kind!r} is neither SentencePiece ('llama') nor byte-level "
            "BPE ('gpt2')"
        )
    return build(metadata)
