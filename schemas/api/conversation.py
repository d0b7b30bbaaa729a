"""From OpenAI's messages to what a chat template takes."""

import json
from collections.abc import Sequence
from typing import Any

from schemas.api.bodies import Message, MessageToolCall
from schemas.api.errors import ApiError, bad_field
from schemas.api.prompts import check_unicode, template_ids
from schemas.api.tools import check_takes_tools
from schemas.models import LoadedModel


def chat_ids(
    messages: Sequence[Message], model: LoadedModel, tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """The prompt that is a conversation, with `tools` as OpenAI spells them. Raises ApiError that names the
    message."""
    return template_ids(template_inputs(messages, model), model, tools=tools)


def template_inputs(messages: Sequence[Message], model: LoadedModel) -> list[dict[str, Any]]:
    """Raises ApiError that names the message."""
    called: set[str] = set()
    inputs = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        said: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _text(message, where),
        }
        if message.tool_calls:
            if message.role != "assistant":
                raise bad_field(f"{where}.tool_calls", "goes with role assistant")
            check_takes_tools(model, f"{where}.tool_calls")
            calls = enumerate(message.tool_calls)
            said["tool_calls"] = [_call(call, f"{where}.tool_calls[{j}]") for j, call in calls]
            called |= {call.id for call in message.tool_calls}
        if message.role == "tool":
            check_takes_tools(model, f"{where}.role")
            if message.tool_call_id not in called:
                raise bad_field(f"{where}.tool_call_id", "is that of no tool call before it")
            said["tool_call_id"] = message.tool_call_id
            if message.name is not None:
                said["name"] = message.name
        elif message.tool_call_id is not None:
            raise bad_field(f"{where}.tool_call_id", "goes with role tool")
        inputs.append(said)
    return inputs


def called_function(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call of earlier, as templates take it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(message: Message, where: str) -> str:
    field = f"{where}.content"
    if message.content is None:
        if not message.tool_calls:
            raise ApiError(400, "missing_field", f"{field}: this field is required", field)
        return ""
    parts = message.content if isinstance(message.content, list) else None
    text = message.content if isinstance(message.content, str) else "".join(p.text for p in parts or ())
    check_unicode(text, field)
    return text


def _call(call: MessageToolCall, where: str) -> dict[str, Any]:
    field = f"{where}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
        json.dumps([call.id, call.function.name, arguments], ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise bad_field(field, "is not the JSON of an object") from None
    if not isinstance(arguments, dict):
        raise bad_field(field, "is not the JSON of an object")
    return called_function(call.id, call.function.name, arguments)
