"""Log probabilities of the output's tokens in OpenAI's two forms, chat's and that of completions."""

from collections.abc import Callable, Sequence
from typing import Any

from schemas.api.prepare import CHAT_COMPLETIONS_URL, COMPLETIONS_URL
from schemas.sampling import TokenLogprobs
from schemas.tokenization import Tokenizer

ToldToken = tuple[int, TokenLogprobs]
Shape = Callable[[Sequence[ToldToken]], dict[str, Any]]

# JSON knows no infinity; OpenAI says this for what cannot be.
_LEAST = -9999.0


def chat_logprobs(tokenizer: Tokenizer) -> Shape:
    """The `logprobs` object of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = _bytes(tokenizer, token_id)
        text = tokenizer.special_texts.get(token_id, "") if data is None else data.decode("utf-8", "replace")
        listed = None if data is None else list(data)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": listed}

    def shape(tokens: Sequence[ToldToken]) -> dict[str, Any]:
        content = []
        for token_id, told in tokens:
            top = zip(told.top_token_ids, told.top_logprobs, strict=True)
            content.append({**entry(token_id, told.logprob), "top_logprobs": [entry(*each) for each in top]})
        return {"content": content, "refusal": None}

    return shape


def completion_logprobs(tokenizer: Tokenizer) -> Shape:
    """The `logprobs` object of a completion, in one piece or many.

    Offsets are characters of the answer's text, as vLLM counts them. A token that is no text by itself is
    spelled `bytes:\\xe2\\x80`, as OpenAI's API does. The token that was sampled is always among
    `top_logprobs`.
    """
    detokenizer = tokenizer.detokenizer()
    offset = 0

    def shape(tokens: Sequence[ToldToken]) -> dict[str, Any]:
        nonlocal offset
        texts, logprobs, tops, offsets = [], [], [], []
        for token_id, told in tokens:
            text = _spelled(tokenizer, token_id)
            top = zip(told.top_token_ids, told.top_logprobs, strict=True)
            texts.append(text)
            logprobs.append(max(told.logprob, _LEAST))
            tops.append(
                {_spelled(tokenizer, i): max(p, _LEAST) for i, p in top} | {text: max(told.logprob, _LEAST)}
            )
            offsets.append(offset)
            offset += len(detokenizer.push([token_id]))
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    return shape


# How each API has them that whole answers of ours carry as a `logprobs` object.
SHAPES: dict[str, Callable[[Tokenizer], Shape]] = {
    CHAT_COMPLETIONS_URL: chat_logprobs,
    COMPLETIONS_URL: completion_logprobs,
}


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    """None for a control token, which adds nothing to the text."""
    if token_id in tokenizer.special_texts or not 0 <= token_id < len(tokenizer.token_bytes):
        return None
    return tokenizer.token_bytes[token_id]


def _spelled(tokenizer: Tokenizer, token_id: int) -> str:
    data = _bytes(tokenizer, token_id)
    if data is None:
        return tokenizer.special_texts.get(token_id, "")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
