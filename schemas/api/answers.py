"""Whole (not streamed) answers, as the gateway returns them and batch results carry them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.api.prepare import CHAT_COMPLETIONS_URL
from schemas.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended normally, as its fold says."""

    request_id: bytes
    model: str
    created_s: int
    text: str
    finish_reason: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int


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


def own_usage(input_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    return {"input_tokens": input_tokens, "cached_tokens": cached_tokens, "output_tokens": output_tokens}


def openai_usage(input_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_completion_id(request_id: bytes) -> str:
    return f"chatcmpl-{request_id.hex()}"


def answer(url: str, finished: Finished) -> dict[str, Any]:
    """The JSON object that `url` answers with when it does not stream."""
    if url == CHAT_COMPLETIONS_URL:
        return {
            "id": chat_completion_id(finished.request_id),
            "object": "chat.completion",
            "created": finished.created_s,
            "model": finished.model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": finished.text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": finished.finish_reason,
                }
            ],
            "usage": openai_usage(finished.input_tokens, finished.cached_tokens, finished.output_tokens),
        }
    return {
        "id": finished.request_id.hex(),
        "model": finished.model,
        "text": finished.text,
        "usage": own_usage(finished.input_tokens, finished.cached_tokens, finished.output_tokens),
        "stop_reason": finished.finish_reason,
    }
