"""Makes a `tokenizer.json` from the SentencePiece vocabulary in a GGUF file.

SentencePiece's BPE merges the neighbours whose joint piece has the best score. That is BPE with every split
of every piece into two pieces as a merge, best score first.
"""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from infra.local.gguf_vocabulary import numbers, read_vocabulary
from workers.weights.gguf_cursor import GGUFError, MetadataValue

_SPACE = "\u2581"  # how SentencePiece writes a space


def build_spm_tokenizer(metadata: Mapping[str, MetadataValue]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata. Raises GGUFError naming the key that does not fit."""
    if metadata.get("tokenizer.ggml.add_space_prefix", True) is not False:
        raise GGUFError("metadata 'tokenizer.ggml.add_space_prefix': only false is supported")
    vocabulary = read_vocabulary(metadata)
    tokens = vocabulary.tokens
    scores = numbers(metadata, "scores", len(tokens))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise GGUFError(f"metadata 'tokenizer.ggml.unknown_token_id': {unknown!r} is not a token id")

    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary.ids,
            merges=_merges(vocabulary.ids, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(vocabulary.added)
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in vocab.items():
        rank = -scores[token_id]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((rank, vocab[left], vocab[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]
