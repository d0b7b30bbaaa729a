"""Text to token ids and back. The ids are what is billed and what the topics carry."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as _HfTokenizer
from tokenizers.decoders import ByteLevel as _ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from schemas.catalog import Catalog, ModelSpec, simulated_model

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPM_SPACE = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: character → byte (Radford et al. 2019, released code)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in plain}
    others = (b for b in range(256) if b not in set(plain))
    alphabet.update({chr(256 + i): b for i, b in enumerate(others)})
    return alphabet


def _decoder_kinds(state: Any) -> set[str]:
    kinds = {state["type"]}
    for inner in state.get("decoders", ()):
        kinds |= _decoder_kinds(inner)
    return kinds


def _byte_table(tokenizer: _HfTokenizer) -> list[bytes]:
    """id → the bytes its text adds to the output; control tokens add none."""
    if tokenizer.decoder is None:
        raise ValueError("tokenizer.json has no decoder: ids cannot be turned into bytes")
    kinds = _decoder_kinds(json.loads(tokenizer.decoder.__getstate__()))
    alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else None
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    for piece, token_id in vocab.items():
        if alphabet is not None:
            try:
                table[token_id] = bytes([alphabet[c] for c in piece])
            except KeyError:
                table[token_id] = piece.encode()
        elif "ByteFallback" in kinds and (match := _BYTE_TOKEN.fullmatch(piece)):
            table[token_id] = bytes([int(match[1], 16)])
        else:
            table[token_id] = piece.replace(_SPM_SPACE, " ").encode()
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        table[token_id] = b"" if added.special else added.content.encode()
    return table


# Characters. `encode` holds the interpreter's lock: 1.2 s a megabyte, in which no other thread runs. A batch
# gives it up, and without the offsets, which nobody reads, it takes a third of the time.
_LONG_TEXT = 4_096
# What a normalizer may leave of a text, in parts: a letter of its combining characters, for example.
_SHRINKS = 4


def simulated_tokenizer() -> _HfTokenizer:
    """One token a byte, no merges; bos and eos of `simulated_model`."""
    alphabet = dict(sorted(_byte_level_alphabet().items(), key=lambda item: item[1]))
    tokenizer = _HfTokenizer(BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = _ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return tokenizer


class Tokenizer:
    """Encodes prompts and holds the id → bytes table that detokenizers share. Thread-safe.

    User text is never parsed for control tokens, so it cannot forge a turn; `encode_template` alone
    knows them.
    """

    def __init__(self, tokenizer: _HfTokenizer, spec: ModelSpec) -> None:
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._prefix = [spec.bos_token_id] if spec.add_bos else []
        self.token_bytes = _byte_table(tokenizer)
        self._most_characters = _SHRINKS * max(map(len, self.token_bytes))
        self.special_ids = {
            added.content: token_id
            for token_id, added in tokenizer.get_added_tokens_decoder().items()
            if added.special and added.content
        }
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self._special = re.compile(
            "(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"(?!)"
        )
        self.special_texts = {token_id: content for content, token_id in self.special_ids.items()}
        self.bos_token = self.special_texts.get(spec.bos_token_id, "")
        # Of several the first is the tokenizer's own.
        self.eos_token = self.special_texts.get(spec.eos_token_ids[0], "") if spec.eos_token_ids else ""

    @classmethod
    def load(cls, catalog: Catalog, model_id: str) -> "Tokenizer":
        """Raises CatalogError for an unknown model, ValueError naming a tokenizer file that is broken."""
        spec = catalog.get(model_id)
        if not spec.tokenizer:
            return cls(simulated_tokenizer(), spec)
        return cls.from_file(catalog.tokenizer_path(spec), spec)

    @classmethod
    def simulated(cls) -> "Tokenizer":
        return cls(simulated_tokenizer(), simulated_model())

    @classmethod
    def from_file(cls, path: Path, spec: ModelSpec) -> "Tokenizer":
        try:
            return cls(_HfTokenizer.from_file(str(path)), spec)
        except Exception as e:  # tokenizers raises bare Exception
            raise ValueError(f"{path}: not a usable tokenizer: {e}") from e

    def fewest_tokens(self, characters: int) -> int:
        """That a text of this length may have; so one that fits no context needs not be read."""
        return characters // self._most_characters

    def encode(self, text: str) -> list[int]:
        """Plain text, nothing added."""
        if len(text) > _LONG_TEXT:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """A completion prompt: the model's bos, if it wants one, and plain text."""
        return self._prefix + self.encode(text)

    def replace_special(self, text: str, replace: Callable[[str], str]) -> str:
        """`text` with each spelled-out control token put through `replace` (see ChatTemplate)."""
        return self._special.sub(lambda match: replace(match[0]), text)

    def encode_template(self, text: str) -> list[int]:
        """Text from a chat template, where control tokens mean themselves."""
        ids: list[int] = []
        for part in self._special.split(text):
            token_id = self.special_ids.get(part)
            if token_id is not None:
                ids.append(token_id)
            elif part:
                ids += self.encode(part)
        return ids

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self.token_bytes)


class Detokenizer:
    """Incremental: the text after `push(a)`, `push(b)` is that of `push(a + b)`, however it is cut.

    A character whose bytes are split over tokens is held back until it is whole. Bytes that can never
    become UTF-8 come out as U+FFFD; an unfinished character at the very end is never shown.
    """

    __slots__ = ("_decode", "_table")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._table = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete; may be empty. Ids outside the vocabulary add nothing."""
        table, size = self._table, len(self._table)
        return self._decode(b"".join([table[i] for i in token_ids if 0 <= i < size]))

    def piece(self, token_id: int) -> str:
        """`push` of one id."""
        return self._decode(self._table[token_id]) if 0 <= token_id < len(self._table) else ""

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        """`push` of each id: the text that it completes."""
        table, size, decode = self._table, len(self._table), self._decode
        return [decode(table[i]) if 0 <= i < size else "" for i in token_ids]
