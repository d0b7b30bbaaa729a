"""Renders a model's chat template (jinja2, sandboxed) into token ids."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.tokenization import Tokenizer

# Templates of transformers are always given them.
_NOTHING: dict[str, Any] = {"tools": None, "documents": None}


class ChatTemplateError(ValueError):
    """The template is broken or refuses the messages; the message is fit for the user."""


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates know it from transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """`{% generation %}` marks what was generated, for training; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's

    def parse(self, parser: Parser) -> list[Node]:
        parser.stream.expect("name:generation")
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[loopcontrols, _Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


class ChatTemplate:
    """One model's template. Control tokens spelled out in a message stay plain text.

    `takes_tools`: it tells the model of the `tools` that it is given.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises ChatTemplateError when `source` does not parse."""
        env = _environment()
        try:
            self._template = env.from_string(source)
            self.takes_tools = "tools" in find_undeclared_variables(env.parse(source))
        except TemplateError as e:
            raise ChatTemplateError(f"the model's chat template is broken: {e}") from e
        self._tokenizer = tokenizer

    def encode(
        self, messages: Sequence[Mapping[str, Any]], *, continue_last: bool = False, **context: Any
    ) -> list[int]:
        """Token ids of the prompt that asks for the assistant's next turn. Raises ChatTemplateError.

        With `continue_last` the last message, the assistant's, is left open: the prompt ends where its
        content does, and nothing that the template puts behind it closes the turn.

        A spelled-out control token in a message travels through the template as a random placeholder, so
        that the template's own control tokens, and only they, become control ids.
        """
        forged: list[str] = []
        nonce = secrets.token_hex(16)

        def hide(control_token: str) -> str:
            forged.append(control_token)
            return f"{nonce}{len(forged) - 1:08d}"

        inputs = [self._disarm(message, hide) for message in messages]
        context = self._disarm(context, hide)
        if continue_last:
            # A template may trim a message; where its content ends shows by what cannot be trimmed.
            end = f"{nonce}end"
            inputs[-1]["content"] += end
            rendered, found, _ = self._render(inputs, False, context).rpartition(end)
            if not found:
                raise ChatTemplateError("the model's chat template cannot continue an answer")
        else:
            rendered = self._render(inputs, True, context)
        if not forged:
            return self._tokenizer.encode_template(rendered)
        ids: list[int] = []
        for i, part in enumerate(re.split(nonce + r"(\d{8})", rendered)):
            ids += (
                self._tokenizer.encode(forged[int(part)]) if i % 2 else self._tokenizer.encode_template(part)
            )
        return ids

    def _render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, context: dict[str, Any]
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._tokenizer.bos_token,
                eos_token=self._tokenizer.eos_token,
                **_NOTHING | context,
            )
        except ChatTemplateError:
            raise
        except TemplateError as e:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {e}") from e
        except Exception as e:  # a template's own type errors, on shapes it did not expect
            raise ChatTemplateError(f"the model's chat template cannot render these messages: {e}") from e

    def _disarm(self, value: Any, hide: Callable[[str], str]) -> Any:
        if isinstance(value, str):
            return self._tokenizer.replace_special(value, hide)
        if isinstance(value, Mapping):
            return {self._disarm(key, hide): self._disarm(item, hide) for key, item in value.items()}
        if isinstance(value, list):
            return [self._disarm(item, hide) for item in value]
        return value
