"""Chat templates as model folders have them, and what is known of a model by its template."""

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.catalog import Catalog, CatalogError, simulated_model
from schemas.chat_template import ChatTemplate
from schemas.models import LoadedModel
from schemas.template_source import tool_call_format
from schemas.tokenization import Tokenizer
from tests.tool_model import TEMPLATE as HERMES_TEMPLATE

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# As Qwen's has it: the call is spelled out in a jinja string.
QWEN = (
    '{%- if tools %}{{- "<tools>" }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}'
    '{{- "</tools> within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, '
    '\\"arguments\\": <args-json-object>}\\n</tool_call>" }}{%- endif %}' + PLAIN
)
# As Llama 3.1's has it: tools are set where they are not given, and calls are written without a frame.
LLAMA = (
    "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
    "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- if tools is not none %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set messages = messages[1:] %}{%- endif %}" + PLAIN
)
# As Qwen 3 Coder's has it.
XML_CALLS = "{% if tools %}<tool_call>\n<function=name>\n</tool_call>{% endif %}" + PLAIN


def loaded(folder: Path, **fields: object) -> LoadedModel:
    """The model of that folder, with bytes as tokens."""
    names = ("id", "architecture", "weights", "tokenizer", "max_model_len", "bos_token_id", "add_bos")
    spec = simulated_model()
    entry = {name: getattr(spec, name) for name in (*names, "eos_token_ids")} | {"id": folder.name} | fields
    (folder / "model.json").write_text(json.dumps(entry))
    return LoadedModel.load(Catalog.load(folder.parent), folder.name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.mkdir()
    return path


def rendered(model: LoadedModel, **context: Any) -> str:
    assert model.chat_template is not None
    ids = model.chat_template.encode([{"role": "user", "content": "hi"}], **context)
    return model.tokenizer.detokenizer().push(ids)


def write_config(folder: Path, value: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))


def test_the_templates_file_comes_before_the_configs_field_and_model_json_before_both(folder: Path) -> None:
    assert loaded(folder).chat_template is None
    write_config(folder, PLAIN)
    assert rendered(loaded(folder)) == "[user]hi"
    (folder / "chat_template.jinja").write_text("jinja:" + PLAIN)
    assert rendered(loaded(folder)) == "jinja:[user]hi"
    assert rendered(loaded(folder, chat_template="own:" + PLAIN)) == "own:[user]hi"


def test_of_several_templates_the_default_is_taken(folder: Path) -> None:
    write_config(folder, [{"name": "rag", "template": "x"}, {"name": "default", "template": PLAIN}])
    assert rendered(loaded(folder)) == "[user]hi"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"tokenizer_config\.json: Expecting"),
        ("[]", r"tokenizer_config\.json: expected an object"),
        ('{"chat_template": 3}', r"tokenizer_config\.json: field 'chat_template' is neither"),
        ('{"chat_template": [{"name": "rag", "template": "x"}]}', "a list that has one named 'default'"),
    ],
)
def test_a_file_that_holds_no_template_is_named(folder: Path, text: str, message: str) -> None:
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(CatalogError, match=message):
        loaded(folder)


def test_a_template_that_is_not_text_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CatalogError, match=r"chat_template\.jinja: .*utf-8"):
        loaded(folder)


@pytest.mark.parametrize(
    ("template", "takes_tools", "call_format"),
    [
        (PLAIN, False, ""),
        (QWEN, True, "hermes"),
        (HERMES_TEMPLATE, True, "hermes"),
        (LLAMA, True, ""),
        (XML_CALLS, True, ""),
        ('It may say tools and <tool_call>\n{"name": 1}.' + PLAIN, False, "hermes"),
    ],
)
def test_tools_are_taken_where_the_template_names_them_and_its_calls_can_be_read(
    folder: Path, template: str, takes_tools: bool, call_format: str
) -> None:
    assert ChatTemplate(template, Tokenizer.simulated()).takes_tools is takes_tools
    assert tool_call_format(template) == call_format
    (folder / "chat_template.jinja").write_text(template)
    model = loaded(folder)
    assert model.takes_tools is (takes_tools and bool(call_format))
    assert model.spec.tool_call_format == (call_format if takes_tools else "")


@pytest.mark.parametrize("template", [QWEN, LLAMA])
def test_tools_that_are_not_given_are_none(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    model = loaded(folder)
    assert rendered(model) == "[user]hi"
    assert '"name"' in rendered(model, tools=[{"name": "weather"}])


def test_a_fallback_has_the_same_template_whatever_file_it_is_in(tmp_path: Path) -> None:
    for name in ("big", "small"):
        (tmp_path / name).mkdir()
    write_config(tmp_path / "big", PLAIN)
    (tmp_path / "small" / "chat_template.jinja").write_text(PLAIN)
    loaded(tmp_path / "small")
    loaded(tmp_path / "big", fallback_models=["small"])
    assert Catalog.load(tmp_path).fallback_models() == {"big": ["small"]}
    (tmp_path / "small" / "chat_template.jinja").write_text(PLAIN + " ")
    with pytest.raises(CatalogError, match="another chat_template"):
        Catalog.load(tmp_path).fallback_models()


def test_a_fallback_may_leave_to_its_template_what_the_other_says(tmp_path: Path) -> None:
    for name, fields in (
        ("small", {}),
        ("big", {"fallback_models": ["small"], "tool_call_format": "hermes"}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text(QWEN)
        loaded(tmp_path / name, **fields)
    assert Catalog.load(tmp_path).fallback_models() == {"big": ["small"]}


def test_what_transformers_gives_templates_is_given(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ eos_token }}{% endfor %}{{ documents is none }}{{ strftime_now('%Y') | length }}"
        "{% for i in range(3) %}{% break %}{% endfor %}"
    )
    assert loaded(folder).chat_template is not None
    template = loaded(folder).chat_template
    assert template is not None
    assert template.encode([{"role": "user", "content": "hi"}]) == [256, *b"hi", 257, *b"True4"]
