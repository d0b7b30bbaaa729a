"""A byte-level BPE vocabulary, trained on the spot, as published files and GGUF files have it."""

import json
from functools import cache
from pathlib import Path

from gguf import GGUFWriter
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers, trainers

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_README = Path(__file__).parents[1] / "README.md"
# Of the published tokenizer.json of Llama 3 and of Qwen 2.5 and 3.
LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
ADDED = {"<|begin|>": True, "<|end|>": True, "<tool_call>": False, "</tool_call>": False}
UNREACHABLE = "Ġsupercalifragilistic"


@cache
def trained(vocab_size: int) -> tuple[dict[str, int], list[list[str]]]:
    """A vocabulary and merges; the last token is made by no merge."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_README.read_text().splitlines(keepends=True), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"] | {UNREACHABLE: len(model["vocab"])}, model["merges"]


@cache
def published(kind: str, vocab_size: int) -> HfTokenizer:
    vocab, merges = trained(vocab_size)
    llama = kind == "llama-bpe"
    added = [
        {
            "id": len(vocab) + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special,
        }
        for index, (content, special) in enumerate(ADDED.items())
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": llama, "use_regex": False}
    split = {
        "type": "Split",
        "pattern": {"Regex": LLAMA_PATTERN if llama else QWEN_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if llama else {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": llama,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return HfTokenizer.from_str(json.dumps(tokenizer))


def add_tokenizer(writer: GGUFWriter, kind: str, vocab_size: int) -> None:
    """To a GGUF file, as llama.cpp's converter does it: padded at the end."""
    vocab, merges = trained(vocab_size)
    types = {token: _CONTROL if special else _USER_DEFINED for token, special in ADDED.items()}
    tokens = [*sorted(vocab, key=vocab.__getitem__), *ADDED, "[PAD0]", "[PAD1]"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([types.get(token, _UNUSED if token.startswith("[PAD") else 1) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
