"""The `response` object of OpenAI's /v1/responses, from its creation to its end.

Source: OpenAI API reference, "The response object".
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.api.answers import message_id
from schemas.api.errors import ApiError
from schemas.api.responses import ResponsesBody
from schemas.records import Completion

# What OpenAI's clients know; our own code begins the message.
_RATE_LIMITED, _SERVER_ERROR = "rate_limit_exceeded", "server_error"
_CANCELLED = "cancelled"
PREFIX = "resp_"


def created_response(body: ResponsesBody, response_id: str, created_s: int) -> dict[str, Any]:
    """The response before anything was done about it: what all later ones are made from."""
    text = msgspec.to_builtins(body.text) if body.text is not None else {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def output_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def output_item(request_id: bytes, status: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that is the answer. `status`: in_progress, completed or incomplete."""
    return {
        "id": message_id(request_id),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": list(content),
    }


def running_response(
    created: dict[str, Any], request_id: bytes, model: str, begun: bool, text: str
) -> dict[str, Any]:
    """Before the end, with the text so far. `begun`: a run is bound; else it is queued."""
    part = [output_part(text)] if text else []
    output = [output_item(request_id, "in_progress", part)] if text else []
    return {**created, "status": "in_progress" if begun else "queued", "model": model, "output": output}


def item_status(finish_reason: str) -> str:
    return "completed" if _status(finish_reason) == "completed" else "incomplete"


def ended_response(
    created: dict[str, Any],
    request_id: bytes,
    model: str,
    end: Completion,
    text: str,
    logprobs: Sequence[Any] = (),
) -> dict[str, Any]:
    """After the end that a worker told: completed, incomplete, cancelled or failed."""
    status = _status(end.finish_reason)
    error = None
    if status == "failed":
        error = {"code": _SERVER_ERROR, "message": end.message or "the engine failed at this request"}
    return {
        **created,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": [output_item(request_id, item_status(end.finish_reason), [output_part(text, logprobs)])],
        "usage": response_usage(end),
    }


def failed_response(
    created: dict[str, Any], request_id: bytes, model: str, error: ApiError, text: str
) -> dict[str, Any]:
    """After the end that admission or the owner told: cancelled or failed, with the text up to it."""
    cancelled = error.code == _CANCELLED
    code = _RATE_LIMITED if error.status == 429 else _SERVER_ERROR
    said = None if cancelled else {"code": code, "message": f"{error.code}: {error.message}"}
    output = [output_item(request_id, "incomplete", [output_part(text)])] if text else []
    return {
        **created,
        "status": "cancelled" if cancelled else "failed",
        "error": said,
        "model": model,
        "output": output,
    }


def response_usage(end: Completion) -> dict[str, Any]:
    return {
        "input_tokens": end.input_tokens,
        "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": end.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.input_tokens + end.output_tokens,
    }


def _status(finish_reason: str) -> str:
    return {"length": "incomplete", "cancelled": "cancelled", "error": "failed"}.get(
        finish_reason, "completed"
    )
