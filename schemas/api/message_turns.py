"""The turns and tools of Anthropic's messages, and what a chat template is told of them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from schemas.api import fields
from schemas.api.conversation import called_function
from schemas.api.errors import bad_field
from schemas.api.prompts import check_unicode
from schemas.api.tools import MAX_TOOLS, Function, Offer, ToolUse, check_takes_tools, use_tools
from schemas.models import LoadedModel


class CacheControl(Struct, forbid_unknown_fields=True):
    """Asks for what prefix caching does by itself."""

    type: Literal["ephemeral"]


class TextBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ToolUseBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Meta(max_length=fields.MAX_PARTS)] | None = None
    is_error: bool = False
    cache_control: CacheControl | None = None


class Turn(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: (
        str | Annotated[list[TextBlock | ToolUseBlock | ToolResultBlock], Meta(max_length=fields.MAX_PARTS)]
    )


class ToolDefinition(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AutoChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool = False


class AnyChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool = False


class ToolNameChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="none"):
    pass


ToolDefinitions = Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)]
MessageToolChoice = AutoChoice | AnyChoice | ToolNameChoice | NoChoice


def message_tools(
    tools: Sequence[ToolDefinition] | None, choice: MessageToolChoice | None, model: LoadedModel
) -> ToolUse | None:
    """None where the model shall know of no tools. Raises ApiError that names the field."""
    if not tools:
        if choice is not None and not isinstance(choice, NoChoice):
            raise bad_field("tool_choice", "goes with tools")
        return None
    check_takes_tools(model, "tools")
    if isinstance(choice, NoChoice):
        return None
    named = choice.name if isinstance(choice, ToolNameChoice) else None
    if named is not None and all(tool.name != named for tool in tools):
        raise bad_field("tool_choice.name", f"{named[:64]!r} is none of the tools")
    functions = [Function(tool.name, tool.description, tool.input_schema, tool.strict) for tool in tools]
    fields = [f"tools[{i}].input_schema" for i in range(len(tools))]
    required = isinstance(choice, AnyChoice | ToolNameChoice)
    parallel = choice is None or not choice.disable_parallel_tool_use
    return use_tools(Offer(functions, fields, required, named, parallel))


def turn_inputs(
    turns: Sequence[Turn], system: str | list[TextBlock] | None, model: LoadedModel
) -> list[dict[str, Any]]:
    """What a template is told. Raises ApiError that names the field."""
    inputs: list[dict[str, Any]] = []
    if system:
        inputs.append({"role": "system", "content": block_text(system, "system")})
    called: set[str] = set()
    for i, turn in enumerate(turns):
        where = f"messages[{i}].content"
        if isinstance(turn.content, str):
            _say(inputs, turn.role, block_text(turn.content, where), [])
            continue
        text: list[TextBlock] = []
        calls: list[dict[str, Any]] = []
        for j, block in enumerate(turn.content):
            field = f"{where}[{j}]"
            match block:
                case TextBlock():
                    text.append(block)
                case ToolUseBlock():
                    _check_place(block, turn.role == "assistant", field, model)
                    calls.append(_call(block, field))
                    called.add(block.id)
                case ToolResultBlock():
                    _check_place(block, turn.role == "user" and not text, field, model)
                    inputs.append(_result(block, field, called))
        if text or calls or not turn.content:
            _say(inputs, turn.role, block_text(text, where), calls)
    return inputs


def block_text(content: str | Sequence[TextBlock], field: str) -> str:
    """Raises ApiError that names `field`."""
    text = content if isinstance(content, str) else "".join(block.text for block in content)
    check_unicode(text, field)
    return text


def _say(inputs: list[dict[str, Any]], role: str, text: str, calls: list[dict[str, Any]]) -> None:
    if inputs and inputs[-1]["role"] == role:
        # Anthropic's API takes turns of one role that follow one another for one.
        last = inputs[-1]
        last["content"] += f"\n{text}"
    else:
        last = {"role": role, "content": text}
        inputs.append(last)
    if calls:
        last["tool_calls"] = last.get("tool_calls", []) + calls


def _check_place(block: ToolUseBlock | ToolResultBlock, right: bool, field: str, model: LoadedModel) -> None:
    check_takes_tools(model, field)
    if not right:
        told = "is the assistant's" if isinstance(block, ToolUseBlock) else "is the user's, before any text"
        raise bad_field(field, told)


def _call(block: ToolUseBlock, field: str) -> dict[str, Any]:
    try:
        json.dumps([block.id, block.name, block.input], ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise bad_field(field, "holds a lone surrogate, or is nested too deeply") from None
    return called_function(block.id, block.name, block.input)


def _result(block: ToolResultBlock, field: str, called: set[str]) -> dict[str, Any]:
    if block.tool_use_id not in called:
        raise bad_field(f"{field}.tool_use_id", "is that of no tool_use before it")
    text = block_text(block.content or "", f"{field}.content")
    # Templates know of no errors.
    said = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "content": said, "tool_call_id": block.tool_use_id}
