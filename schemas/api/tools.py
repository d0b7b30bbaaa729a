"""Tools that a model may call: what OpenAI's bodies say of them, what template and engine are told."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, to_builtins

from schemas.api.errors import ApiError, bad_field
from schemas.api.structured import checked_grammar, schema_grammar
from schemas.api.tool_calls import CLOSE, OPEN
from schemas.models import LoadedModel
from schemas.sampling import Grammar

MAX_TOOLS = 128
# As models were trained to write JSON: Python's json.dumps.
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """`parameters`: the JSON schema of its arguments, an object's; none are no arguments."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class FunctionName(Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolUse(NamedTuple):
    """`tools`: what the template is given. `grammar`: what the output must be, None where it is free."""

    tools: list[dict[str, Any]]
    grammar: Grammar | None


class Offer(NamedTuple):
    """The functions that may be called. `fields` name the schema of each in the body.

    `named`: the one that must be called; `required`: any of them must be; `parallel`: several may be.
    """

    functions: Sequence[Function]
    fields: Sequence[str]
    required: bool
    named: str | None
    parallel: bool


def openai_tools(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None, model: LoadedModel
) -> ToolUse | None:
    """None where the model shall know of no tools. Raises ApiError that names the field."""
    if not tools:
        if choice not in (None, "none"):
            raise bad_field("tool_choice", "goes with tools")
        return None
    check_takes_tools(model, "tools")
    if choice == "none":
        return None
    functions = [tool.function for tool in tools]
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and all(function.name != named for function in functions):
        raise bad_field("tool_choice.function.name", f"{named[:64]!r} is none of the tools")
    fields = [f"tools[{i}].function.parameters" for i in range(len(functions))]
    required = choice == "required" or named is not None
    return use_tools(Offer(functions, fields, required, named, parallel is not False))


def check_takes_tools(model: LoadedModel, field: str) -> None:
    """Raises ApiError that names `field`, which asks for tools, where the model has none."""
    if not model.takes_tools:
        message = f"{field}: model {model.spec.id} has no tools in its chat template"
        raise ApiError(400, "unsupported_field", message, field)


def use_tools(offer: Offer) -> ToolUse:
    """Raises ApiError that names the field."""
    names = [function.name for function in offer.functions]
    if len(set(names)) < len(names):
        raise bad_field("tools", "two have the same name")
    for function, field in zip(offer.functions, offer.fields, strict=True):
        if (function.parameters or _NO_ARGUMENTS).get("type", "object") != "object":
            raise bad_field(f"{field}.type", "must be object")
    described = [{"type": "function", "function": _described(function)} for function in offer.functions]
    try:
        json.dumps(described, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_field("tools", "holds a lone surrogate, which is no text") from None
    except RecursionError:
        raise bad_field("tools", "nested too deeply") from None
    return ToolUse(described, _grammar(offer))


def _described(function: Function) -> dict[str, Any]:
    found: dict[str, Any] = to_builtins(function)
    found.pop("strict", None)
    # Templates take both for given.
    return {"description": "", **found, "parameters": function.parameters or _NO_ARGUMENTS}


def _grammar(offer: Offer) -> Grammar | None:
    """Free is what asks for nothing that a model might not do: any text, any calls.

    Where a call must be, its arguments keep to the schema; else only those of functions that are `strict`.
    """
    if not offer.required and offer.parallel and not any(f.strict for f in offer.functions):
        return None
    rules = []
    bodies = []
    for i, (function, field) in enumerate(zip(offer.functions, offer.fields, strict=True)):
        if offer.named not in (None, function.name):
            continue
        schema: dict[str, Any] = {"type": "object"}
        if offer.required or function.strict:
            schema |= function.parameters or _NO_ARGUMENTS
            schema_grammar(schema, field)
        head = json.dumps(f'\n{{"name": "{function.name}", "arguments": ')
        bodies.append(f"b{i}")
        rules.append(f'b{i}: {head} a{i} "}}"')
        rules.append(f"a{i}: %json {json.dumps(schema | {'x-guidance': _SPELLING}, ensure_ascii=False)}")
    close = json.dumps(f"\n{CLOSE}")
    rules.append(f"body: ({' | '.join(bodies)}) {close}")
    if offer.required:
        again = f"({json.dumps(chr(10) + OPEN)} body)*" if offer.parallel and offer.named is None else ""
        start = f"start: {json.dumps(OPEN)} body {again}"
    else:
        start = "start: (opened body)* TEXT?" if offer.parallel else "start: (opened body | TEXT)?"
        rules.append(f"opened[lazy]: /(?s:.*){OPEN}/")
        rules.append(f"TEXT: /(?s:.+)/ & ~/(?s:.*{OPEN}.*)/")
    return checked_grammar(Grammar("lark", "\n".join([start, *rules]) + "\n"), "tools")
