"""POST /tokenize and /detokenize, as vLLM has them."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from schemas.api.bodies import Messages
from schemas.api.conversation import chat_ids
from schemas.api.errors import bad_field
from schemas.api.prompts import check_token_ids, check_unicode, find_model
from schemas.models import LoadedModel

TOKENIZE_URL = "/tokenize"
DETOKENIZE_URL = "/detokenize"
_MAX_TOKENS = 1_000_000


class TokenizeBody(Struct, forbid_unknown_fields=True):
    """`add_special_tokens`: the model's bos before a prompt; messages get what the chat template says."""

    model: str
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True):
    model: str
    tokens: Annotated[list[int], Meta(max_length=_MAX_TOKENS)]


def tokenize(body: TokenizeBody, models: Mapping[str, LoadedModel]) -> dict[str, Any]:
    """The ids that a request with this prompt has. Raises ApiError that names the field."""
    model = find_model(body.model, models)
    if body.messages is not None:
        if body.prompt is not None:
            raise bad_field("prompt", "give either prompt or messages")
        if body.add_special_tokens:
            raise bad_field("add_special_tokens", "goes with prompt; messages are rendered by the template")
        ids = chat_ids(body.messages, model)
    elif body.prompt is not None:
        check_unicode(body.prompt, "prompt")
        bare = body.add_special_tokens is False
        ids = model.tokenizer.encode(body.prompt) if bare else model.tokenizer.encode_prompt(body.prompt)
    else:
        raise bad_field("prompt", "give either prompt or messages")
    return {"count": len(ids), "max_model_len": model.spec.max_model_len, "tokens": ids}


def detokenize(body: DetokenizeBody, models: Mapping[str, LoadedModel]) -> dict[str, str]:
    """The text of the ids, control tokens spelled out. Raises ApiError that names the field."""
    tokenizer = find_model(body.model, models).tokenizer
    check_token_ids(body.tokens, len(tokenizer.token_bytes), "tokens")
    special = tokenizer.special_texts
    pieces = [special[i].encode() if i in special else tokenizer.token_bytes[i] for i in body.tokens]
    return {"prompt": b"".join(pieces).decode("utf-8", "replace")}
