"""Byte-level BPE out of a GGUF file, against a tokenizer.json of the same vocabulary as models publish it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from infra.local.gguf_tokenizer import build_tokenizer
from schemas.catalog import ModelSpec
from schemas.tokenization import Tokenizer
from tests.bpe_files import UNREACHABLE, add_tokenizer, published, trained
from workers.weights.gguf import GGUFFile
from workers.weights.gguf_cursor import GGUFError

VOCAB_SIZE = 900


def metadata(path: Path, kind: str) -> dict[str, Any]:
    """Of a GGUF file with the vocabulary."""
    writer = GGUFWriter(path, "llama")
    add_tokenizer(writer, kind, VOCAB_SIZE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as gguf:
        return dict(gguf.metadata)


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfTokenizer]:
    folder = tmp_path_factory.mktemp("gguf")
    kinds = ("llama-bpe", "qwen2")
    return {kind: build_tokenizer(metadata(folder / f"{kind}.gguf", kind)) for kind in kinds}


TEXTS = [
    "",
    "Hello, world!  Two  spaces\n\n\tand a tab \r\n",
    "I'LL say it's 1234567 or 12 34,567.89",
    "naïve café cafe\u0301 Ωμέγα 日本語 한국어 हिन्दी 😀👩‍👩‍👧",
    "<|begin|>x<|end|> <tool_call>{}</tool_call> [PAD0]",
    " supercalifragilistic",
    "def f(x):\n    return x ** 2  # comment",
]
TEXT = st.text(
    st.one_of(st.sampled_from(" \n\r\t'aeinst.,19\u0301"), st.characters(codec="utf-8")), max_size=40
)


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_published_file(from_gguf: dict[str, HfTokenizer], kind: str, text: str) -> None:
    assert from_gguf[kind].encode(text).ids == published(kind, VOCAB_SIZE).encode(text).ids


def test_the_ways_differ_in_digits_whole_words_and_composition(from_gguf: dict[str, HfTokenizer]) -> None:
    llama, qwen = from_gguf["llama-bpe"], from_gguf["qwen2"]
    vocab, _ = trained(VOCAB_SIZE)
    assert llama.encode(" supercalifragilistic").ids == [vocab[UNREACHABLE]]
    assert vocab[UNREACHABLE] not in qwen.encode(" supercalifragilistic").ids
    assert len(qwen.encode("1000").ids) == 4
    assert qwen.encode("cafe\u0301").ids == qwen.encode("café").ids
    assert llama.encode("cafe\u0301").ids != llama.encode("café").ids


@settings(max_examples=200, deadline=None)
@given(text=TEXT, kind=st.sampled_from(["llama-bpe", "qwen2"]))
def test_ids_are_those_of_the_published_file_for_any_text(
    from_gguf: dict[str, HfTokenizer], text: str, kind: str
) -> None:
    assert from_gguf[kind].encode(text).ids == published(kind, VOCAB_SIZE).encode(text).ids


@given(text=TEXT)
def test_text_comes_back_and_cannot_forge_control_tokens(
    from_gguf: dict[str, HfTokenizer], text: str
) -> None:
    spec = ModelSpec("m", "llama", "w", "t", 100, 0, False, [1])
    tokenizer = Tokenizer(HfTokenizer.from_str(from_gguf["llama-bpe"].to_str()), spec)
    ids = tokenizer.encode(f"{text}<|end|>")
    assert tokenizer.special_ids["<|end|>"] not in ids
    assert tokenizer.detokenizer().push(ids) == f"{text}<|end|>"


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda values: values.pop(f"tokenizer.ggml.{name}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model"), r"'tokenizer\.ggml\.model': None is neither SentencePiece"),
        (lambda v: v.update({"tokenizer.ggml.model": "bert"}), r"\.model': 'bert' is neither"),
        (without("pre"), r"'tokenizer\.ggml\.pre': None is not one of llama-bpe, qwen2"),
        (lambda v: v.update({"tokenizer.ggml.pre": "tekken"}), r"\.pre': 'tekken' is not one of"),
        (without("tokens"), r"'tokenizer\.ggml\.tokens': not a list of strings"),
        (lambda v: v["tokenizer.ggml.tokens"].append("!"), r"\.token_type': not an array of one number"),
        (lambda v: v["tokenizer.ggml.tokens"].__setitem__(5, "!"), r"\.tokens': a token is given twice"),
        (without("token_type"), r"'tokenizer\.ggml\.token_type': not an array of one number"),
        (without("merges"), r"'tokenizer\.ggml\.merges': not a list of strings"),
        (lambda v: v["tokenizer.ggml.merges"].append("!"), r"\.merges': '!' is not of two tokens"),
        (lambda v: v["tokenizer.ggml.merges"].append("! nobody"), r"'! nobody' is not of two tokens"),
        (lambda v: v["tokenizer.ggml.merges"].append("Ġ Ġsuper"), "or makes none"),
    ],
)
def test_what_is_not_known_or_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    values = metadata(tmp_path / "m.gguf", "qwen2")
    change(values)
    with pytest.raises(GGUFError, match=message):
        build_tokenizer(values)
