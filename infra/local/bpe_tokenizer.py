"""Makes a `tokenizer.json` from the byte-level BPE vocabulary in a GGUF file, as Llama 3 and Qwen have it.

What a GGUF file has no key for is how a text is cut before merges are made: it names a known way, whose rule
is that of the published tokenizer.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from infra.local.gguf_vocabulary import read_vocabulary, strings
from workers.weights.gguf_cursor import GGUFError, MetadataValue


@dataclass(frozen=True, slots=True)
class _Cut:
    """`digits` in one piece; `whole_words` that are tokens are not made by merges; `composed`: NFC first."""

    digits: str
    whole_words: bool
    composed: bool


_CUTS = {
    "llama-bpe": _Cut(digits=r"\p{N}{1,3}", whole_words=True, composed=False),
    "qwen2": _Cut(digits=r"\p{N}", whole_words=False, composed=True),
}


def build_bpe_tokenizer(metadata: Mapping[str, MetadataValue]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata. Raises GGUFError naming the key that does not fit."""
    name = metadata.get("tokenizer.ggml.pre")
    cut = _CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise GGUFError(f"metadata 'tokenizer.ggml.pre': {name!r} is not one of {', '.join(_CUTS)}")
    vocabulary = read_vocabulary(metadata)
    merges = []
    for merge in strings(metadata, "merges"):
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= vocabulary.ids.keys():
            raise GGUFError(
                f"metadata 'tokenizer.ggml.merges': {merge!r} is not of two tokens, or makes none"
            )
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=cut.whole_words))
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + cut.digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added)
    return tokenizer
