"""The chat template that a model's folder has, and the form of tool calls that a template teaches."""

import json
import re
from pathlib import Path

TEMPLATE_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
# Of several templates the one that transformers takes where none is named.
_DEFAULT = "default"
# A call's JSON, spelled out for the model or written from messages; in a jinja string quotes may be escaped.
_HERMES_CALL = re.compile(r"""<tool_call>(?:\\n|\s)*\{\\*"name\\*":""")


class TemplateSourceError(ValueError):
    """The message names the file and the field."""


def folder_template(folder: Path) -> str:
    """As transformers looks for it: chat_template.jinja, else `chat_template` in tokenizer_config.json.

    Empty where there is neither. Raises TemplateSourceError for a file that cannot be read, or a field that
    is no template.
    """
    try:
        return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateSourceError(f"{folder / TEMPLATE_FILE}: {error}") from None
    source = folder / TOKENIZER_CONFIG
    try:
        config = json.loads(source.read_bytes())
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise TemplateSourceError(f"{source}: {error}") from None
    if not isinstance(config, dict):
        raise TemplateSourceError(f"{source}: expected an object")
    return _one_of(config.get("chat_template"), source)


def _one_of(value: object, source: Path) -> str:
    match value:
        case None:
            return ""
        case str(template):
            return template
        case list(named):
            for each in named:
                if isinstance(each, dict) and each.get("name") == _DEFAULT:
                    return _one_of(each.get("template"), source)
    raise TemplateSourceError(
        f"{source}: field 'chat_template' is neither a template nor a list that has one named {_DEFAULT!r}"
    )


def tool_call_format(template: str) -> str:
    """The one of catalog.TOOL_CALL_FORMATS in which the template writes calls, or empty."""
    return "hermes" if _HERMES_CALL.search(template) else ""
