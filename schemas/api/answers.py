"""Whole (not streamed) answers, as the gateway returns them and batch results carry them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.api.prepare import CHAT_COMPLETIONS_URL, COMPLETIONS_URL, MESSAGES_URL
from schemas.api.tool_calls import ToolCall
from schemas.records import Completion
from schemas.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended normally, as its fold says.

    `stop_sequence` is the stop string that ended the output, None where none did or nobody asks. `logprobs`
    are in the form of the API (see logprobs.py), None where they were not asked for; so is `service_tier`.
    """

    request_id: bytes
    model: str
    created_s: int
    text: str
    finish_reason: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    logprobs: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequence: str | None = None
    tool_calls: Sequence[ToolCall] = ()


def visible_ids(token_ids: Sequence[int], finish_reason: str | None) -> Sequence[int]:
    """The ids whose text is shown: a stop or end token that ended the output is counted, not shown."""
    return token_ids[:-1] if finish_reason == "stop" else token_ids


def output_text(
    tokenizer: Tokenizer, token_ids: Sequence[int], finish_reason: str, text_length: int | None = None
) -> str:
    """`text_length`: characters up to the stop string that ended the output; None if none did."""
    if text_length is not None:
        return tokenizer.detokenizer().push(token_ids)[:text_length]
    return tokenizer.detokenizer().push(visible_ids(token_ids, finish_reason))


def num_shown(
    tokenizer: Tokenizer, token_ids: Sequence[int], finish_reason: str, text_length: int | None = None
) -> int:
    """How many tokens the text of `output_text` comes from; the last one may be shown in part."""
    if text_length is None:
        return len(visible_ids(token_ids, finish_reason))
    push, length = tokenizer.detokenizer().push, 0
    for count, token_id in enumerate(token_ids):
        if length >= text_length:
            return count
        length += len(push((token_id,)))
    return len(token_ids)


def stop_sequence(cut_off: str, stop: Sequence[str]) -> str | None:
    """Which of the stop strings ended an output: `cut_off` is the text from where it was cut."""
    return min((string for string in stop if cut_off.startswith(string)), key=len, default=None)


def own_usage(input_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    return {"input_tokens": input_tokens, "cached_tokens": cached_tokens, "output_tokens": output_tokens}


def openai_usage(input_tokens: int, cached_tokens: int | None, output_tokens: int) -> dict[str, Any]:
    """`cached_tokens` None: not known yet."""
    counts = {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
    }
    if cached_tokens is None:
        return counts
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached_tokens}}


def tool_call_id(prefix: str, request_id: bytes, index: int) -> str:
    """The same whenever an output is read; `prefix` is the API's."""
    return f"{prefix}_{request_id.hex()}{index}"


def chat_finish_reason(finish_reason: str, num_tool_calls: int) -> str:
    """In OpenAI's words."""
    return "tool_calls" if num_tool_calls and finish_reason == "stop" else finish_reason


def chat_completion_id(request_id: bytes) -> str:
    return f"chatcmpl-{request_id.hex()}"


def completion_id(request_id: bytes) -> str:
    return f"cmpl-{request_id.hex()}"


def message_usage(input_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Anthropic's: the prompt's tokens are those read from the cache and the others."""
    return {
        "input_tokens": input_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def message_stop(
    finish_reason: str, stop_sequence: str | None, num_tool_calls: int = 0
) -> dict[str, str | None]:
    """Why a message ended, in Anthropic's words."""
    if finish_reason == "length":
        reason = "max_tokens"
    elif num_tool_calls and stop_sequence is None:
        reason = "tool_use"
    else:
        reason = "end_turn" if stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop_sequence}


def message_id(request_id: bytes) -> str:
    return f"msg_{request_id.hex()}"


def answer(url: str, *choices: Finished) -> dict[str, Any]:
    """The JSON object that `url` answers with when it does not stream. Several only where it has choices."""
    (finished, *others) = choices
    if url == CHAT_COMPLETIONS_URL:
        return _chat_completion(choices)
    if url == COMPLETIONS_URL:
        return _completion(choices)
    assert not others
    if url == MESSAGES_URL:
        return _message(finished)
    return {
        "id": finished.request_id.hex(),
        "model": finished.model,
        "text": finished.text,
        "usage": own_usage(finished.input_tokens, finished.cached_tokens, finished.output_tokens),
        "stop_reason": finished.finish_reason,
    }


def total_usage(ends: Sequence[Finished] | Sequence[Completion]) -> dict[str, Any]:
    """OpenAI's usage of all choices: what their rows of the bill come to, the prompt of each among it."""
    return openai_usage(
        sum(end.input_tokens for end in ends),
        sum(end.cached_tokens for end in ends),
        sum(end.output_tokens for end in ends),
    )


def _chat_completion(choices: Sequence[Finished]) -> dict[str, Any]:
    first = choices[0]
    tier = {} if first.service_tier is None else {"service_tier": first.service_tier}
    return {
        "id": chat_completion_id(first.request_id),
        "object": "chat.completion",
        "created": first.created_s,
        "model": first.model,
        **tier,
        "choices": [
            {
                "index": index,
                "message": _chat_message(finished),
                "logprobs": finished.logprobs,
                "finish_reason": chat_finish_reason(finished.finish_reason, len(finished.tool_calls)),
            }
            for index, finished in enumerate(choices)
        ],
        "usage": total_usage(choices),
    }


def _chat_message(finished: Finished) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": finished.text, "refusal": None}
    if finished.tool_calls:
        message["content"] = finished.text or None
        message["tool_calls"] = [
            {
                "id": tool_call_id("call", finished.request_id, index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(finished.tool_calls)
        ]
    return message


def _completion(choices: Sequence[Finished]) -> dict[str, Any]:
    first = choices[0]
    return {
        "id": completion_id(first.request_id),
        "object": "text_completion",
        "created": first.created_s,
        "model": first.model,
        "choices": [
            {
                "text": finished.text,
                "index": index,
                "logprobs": finished.logprobs,
                "finish_reason": finished.finish_reason,
            }
            for index, finished in enumerate(choices)
        ],
        "usage": total_usage(choices),
    }


def _message(finished: Finished) -> dict[str, Any]:
    return {
        "id": message_id(finished.request_id),
        "type": "message",
        "role": "assistant",
        "model": finished.model,
        "content": _message_content(finished),
        **message_stop(finished.finish_reason, finished.stop_sequence, len(finished.tool_calls)),
        "usage": message_usage(finished.input_tokens, finished.cached_tokens, finished.output_tokens),
    }


def _message_content(finished: Finished) -> list[dict[str, Any]]:
    """A call that was cut off has no input that could be an object: it is left out, the reason says why."""
    blocks: list[dict[str, Any]] = []
    if finished.text or not finished.tool_calls:
        blocks.append({"type": "text", "text": finished.text})
    for index, call in enumerate(finished.tool_calls):
        call_id = tool_call_id("toolu", finished.request_id, index)
        arguments = call.parsed()
        if arguments is not None:
            blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": arguments})
    return blocks
