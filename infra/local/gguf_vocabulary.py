"""The vocabulary in a GGUF file, of whatever kind its tokenizer is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken

from workers.weights.gguf_cursor import GGUFError, MetadataValue

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
# Declared as user-defined text, but what a model takes as a picture is not for user text to write.
_MEDIA_MARKERS = frozenset({"[multimodal]", "<start_of_image>", "<end_of_image>"})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens` by id; `ids` by token; `added` are those that stand for themselves in a text or control."""

    tokens: list[str]
    ids: dict[str, int]
    added: list[AddedToken]


def read_vocabulary(metadata: Mapping[str, MetadataValue]) -> Vocabulary:
    """Raises GGUFError naming the key that does not fit."""
    tokens = strings(metadata, "tokens")
    types = numbers(metadata, "token_type", len(tokens))
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise GGUFError("metadata 'tokenizer.ggml.tokens': a token is given twice")
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED or token in _MEDIA_MARKERS)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return Vocabulary(tokens, ids, added)


def strings(metadata: Mapping[str, MetadataValue], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values:
        raise GGUFError(f"metadata 'tokenizer.ggml.{name}': not a list of strings")
    return values


def numbers(metadata: Mapping[str, MetadataValue], name: str, count: int) -> Sequence[float]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None or isinstance(values, bool | int | float | str | list) or len(values) != count:
        raise GGUFError(f"metadata 'tokenizer.ggml.{name}': not an array of one number for each token")
    as_list: list[float] = values.tolist()
    return as_list
