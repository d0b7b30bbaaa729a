"""Makes a `tokenizer.json` from the SentencePiece vocabulary in a GGUF file.

SentencePiece's BPE merges the neighbours whose joint piece has the best score. That is BPE with every split
of every piece into two pieces as a merge, best score first.
"""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from workers.weights.gguf import GGUFError, MetadataValue

_SPACE = "\u2581"  # how SentencePiece writes a space
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
# Declared as user-defined text, but what a model takes as a picture is not for user text to write.
_MEDIA_MARKERS = frozenset({"[multimodal]", "<start_of_image>", "<end_of_image>"})


def build_tokenizer(metadata: Mapping[str, MetadataValue]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata. Raises GGUFError naming the key that does not fit."""
    if metadata.get("tokenizer.ggml.model") != "llama":
        raise GGUFError(
            f"metadata 'tokenizer.ggml.model': {metadata.get('tokenizer.ggml.model')!r} is not SentencePiece "
            "('llama')"
        )
    if metadata.get("tokenizer.ggml.add_space_prefix", True) is not False:
        raise GGUFError("metadata 'tokenizer.ggml.add_space_prefix': only false is supported")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise GGUFError("metadata 'tokenizer.ggml.tokens': not a list of strings")
    scores = _numbers(metadata, "scores", len(tokens))
    types = _numbers(metadata, "token_type", len(tokens))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise GGUFError("metadata 'tokenizer.ggml.tokens': a token is given twice")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise GGUFError(f"metadata 'tokenizer.ggml.unknown_token_id': {unknown!r} is not a token id")

    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges(vocab, scores),
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
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USER_DEFINED or token in _MEDIA_MARKERS)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _numbers(metadata: Mapping[str, MetadataValue], name: str, count: int) -> Sequence[float]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None or isinstance(values, bool | int | float | str | list) or len(values) != count:
        raise GGUFError(f"metadata 'tokenizer.ggml.{name}': not an array of one number for each token")
    numbers: list[float] = values.tolist()
    return numbers


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
