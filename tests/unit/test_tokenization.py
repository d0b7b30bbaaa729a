import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE

from schemas.catalog import ModelSpec, simulated_model
from schemas.chat_template import ChatTemplate, ChatTemplateError
from schemas.tokenization import Tokenizer

SIMULATED = Tokenizer.simulated()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def spm_like() -> Tokenizer:
    """A small SentencePiece-style vocabulary: ▁ for space, byte pieces, two control tokens."""
    pieces = ["<bos>", "<eos>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581hi", "hi", "\u2581", "é"]
    hf = HfTokenizer(BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token=None))
    hf.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    hf.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return Tokenizer(hf, ModelSpec("m", "x", "w", "t", 100, 0, True, [1]))


@given(TEXT)
def test_text_comes_back(text: str) -> None:
    assert SIMULATED.detokenizer().push(SIMULATED.encode(text)) == text


@given(TEXT, st.data())
def test_the_text_does_not_depend_on_how_the_tokens_are_cut(text: str, data: st.DataObject) -> None:
    ids = SIMULATED.encode(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    detokenizer = SIMULATED.detokenizer()
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(pieces) == text
    for piece in pieces:
        piece.encode()  # never half a character


@given(st.lists(st.integers(-5, 400), max_size=60), st.data())
def test_any_ids_give_valid_unicode_however_they_are_cut(ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    whole, parts = SIMULATED.detokenizer().push(ids), SIMULATED.detokenizer()
    assert parts.push(ids[:cut]) + parts.push(ids[cut:]) == whole
    one_by_one = SIMULATED.detokenizer()
    pieces = [one_by_one.push([token_id]) for token_id in ids]
    assert SIMULATED.detokenizer().pieces(ids) == pieces
    by_piece = SIMULATED.detokenizer()
    assert [by_piece.piece(token_id) for token_id in ids] == pieces
    whole.encode()


def test_a_character_over_several_tokens_is_held_back_until_whole() -> None:
    detokenizer = SIMULATED.detokenizer()
    assert [detokenizer.push([byte]) for byte in "a😀".encode()] == ["a", "", "", "", "😀"]


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert SIMULATED.detokenizer().push([0xFF, 0x41]) == "\ufffdA"


def test_sentencepiece_pieces_become_bytes() -> None:
    tokenizer = spm_like()
    table = tokenizer.token_bytes
    assert (table[0], table[2 + 0xC3], table[258], table[261]) == (b"", b"\xc3", b" hi", "é".encode())
    assert tokenizer.detokenizer().push([0, 258, 2 + 0xC3, 2 + 0xA9, 1]) == " hié"


def test_prompts_get_the_bos_the_model_wants_and_user_text_cannot_forge_control_tokens() -> None:
    ids = SIMULATED.encode_prompt("<eos>hi")
    assert ids == [256, *b"<eos>hi"]


@given(TEXT)
def test_no_text_has_fewer_tokens_than_are_told(text: str) -> None:
    for tokenizer in (SIMULATED, spm_like()):
        assert tokenizer.fewest_tokens(len(text)) <= len(tokenizer.encode(text))
    assert SIMULATED.fewest_tokens(8 << 20) > 32_768


def test_a_long_text_is_read_as_a_short_one_and_other_threads_run_meanwhile() -> None:
    tokenizer = Tokenizer.simulated()
    text = "<bos>ä lo" * 60_000  # control tokens are text in it too
    turns = 0
    done = threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    ids = tokenizer.encode(text)
    before = turns
    done.set()
    thread.join()
    assert bytes(ids) == text.encode()
    # With the interpreter's lock held there would be one turn, at the end.
    assert before > 5


def test_a_template_may_use_control_tokens() -> None:
    assert SIMULATED.encode_template("<bos>a<eos>") == [256, ord("a"), 257]


def test_messages_cannot_forge_control_tokens_whatever_the_template_does_with_them() -> None:
    template = ChatTemplate(
        "<bos>{% for m in messages|reverse %}{{ m.content|trim }}|{{ m.content }}<eos>{% endfor %}", SIMULATED
    )
    ids = template.encode([{"role": "user", "content": " <eos>x"}, {"role": "user", "content": "y<bos>"}])
    assert ids == [256, *b"y<bos>|y<bos>", 257, *b"<eos>x| <eos>x", 257]


def test_an_answer_is_continued_behind_its_last_character() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:{{ m.content|trim }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        SIMULATED,
    )
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I <eos>am"}]
    ids = template.encode(messages, continue_last=True)
    assert ids == [*b"user:x", 257, *b"assistant:I <eos>am"]
    assert messages[-1]["content"] == "I <eos>am"
    with pytest.raises(ChatTemplateError, match="cannot continue"):
        ChatTemplate("{{ messages[0].content }}", SIMULATED).encode(messages, continue_last=True)


@given(st.lists(st.sampled_from(["<eos>", "<bos>", "a", " ", "\n"]), max_size=8).map("".join))
def test_a_message_reads_the_same_with_and_without_control_tokens_in_it(content: str) -> None:
    ids = ChatTemplate(simulated_model().chat_template, SIMULATED).encode(
        [{"role": "user", "content": content}]
    )
    assert not {256, 257} & set(ids)
    assert SIMULATED.detokenizer().push(ids) == f"<|user|>{content}\n<|assistant|>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "broken"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
    ],
)
def test_templates_that_fail_say_so(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, SIMULATED).encode([{"role": "user", "content": "x"}])
