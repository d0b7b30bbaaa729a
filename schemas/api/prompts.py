"""From what a body asks with to prompt ids, and how much output fits behind them."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.api.errors import ApiError, bad_field
from schemas.chat_template import ChatTemplateError
from schemas.models import LoadedModel
from schemas.record_size import MAX_REQUEST_TOKENS


def find_model(model_id: str, models: Mapping[str, LoadedModel]) -> LoadedModel:
    """Raises ApiError 404 that lists the models there are."""
    model = models.get(model_id)
    if model is None:
        known = ", ".join(sorted(models))
        message = f"model {model_id!r} does not exist; there is: {known}"
        raise ApiError(404, "model_not_found", message, "model")
    return model


def text_ids(prompt: str, model: LoadedModel, field: str = "prompt") -> list[int]:
    """The prompt that is a text. Raises ApiError that names `field`."""
    check_unicode(prompt, field)
    _check_length(len(prompt), model, field)
    ids = model.tokenizer.encode_prompt(prompt)
    if not ids:
        raise bad_field(field, "must not be empty for this model")
    return ids


def completion_prompts(
    prompt: str | list[str | int | list[int]], model: LoadedModel
) -> list[tuple[str, list[int]]]:
    """OpenAI's `prompt`: a text, token ids as they are, or a list of these. Each with the name of its field.

    Raises ApiError that names it.
    """
    if isinstance(prompt, str):
        return [("prompt", text_ids(prompt, model))]
    if not prompt:
        raise bad_field("prompt", "must not be empty")
    vocab_size = len(model.tokenizer.token_bytes)
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [("prompt", check_token_ids(ids, vocab_size, "prompt"))]
    if ids:
        raise bad_field("prompt", "holds token ids beside prompts; a list is of one or the other")
    found = []
    for i, item in enumerate(prompt):
        field = f"prompt[{i}]"
        if isinstance(item, list):
            if not item:
                raise bad_field(field, "must not be empty")
            found.append((field, check_token_ids(item, vocab_size, field)))
        else:
            assert isinstance(item, str)
            found.append((field, text_ids(item, model, field)))
    return found


def template_ids(
    inputs: Sequence[Mapping[str, Any]],
    model: LoadedModel,
    *,
    continue_last: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The prompt of messages as a chat template takes them; `continue_last`: the output goes on with the last
    one, the assistant's. Raises ApiError that names `messages`."""
    if model.chat_template is None:
        raise bad_field("messages", f"model {model.spec.id} has no chat template; use prompt")
    contents = (message.get("content") for message in inputs)
    _check_length(sum(len(text) for text in contents if isinstance(text, str)), model, "messages")
    context = {} if tools is None else {"tools": tools}
    try:
        return model.chat_template.encode(inputs, continue_last=continue_last, **context)
    except ChatTemplateError as e:
        raise bad_field("messages", str(e)) from None
    except RecursionError:
        raise bad_field("messages", "nested too deeply") from None


def _check_length(characters: int, model: LoadedModel, field: str) -> None:
    """Refuses what is too long by far without reading it, which takes seconds. Raises ApiError."""
    fewest, context = model.tokenizer.fewest_tokens(characters), model.spec.max_model_len
    if fewest >= context:
        message = f"{field}: {fewest} tokens and more leave no room in the model's context of {context}"
        raise ApiError(400, "context_length_exceeded", message, field)


def check_unicode(text: str, field: str) -> None:
    """JSON can spell half a surrogate pair; no tokenizer can read it. Raises ApiError that names `field`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_field(field, "holds a lone surrogate, which is no text") from None


def check_token_ids(token_ids: list[int], vocab_size: int, field: str) -> list[int]:
    """`token_ids`, all of them in the vocabulary. Raises ApiError that names the one that is not."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            where = f"{field}[{index}]"
            raise bad_field(where, f"{token_id} is no token id; they are 0 to {vocab_size - 1}")
    return token_ids


def output_limit(
    wanted: int | None, default: int, limit_field: str, prompt: int, context: int, field: str
) -> int:
    """Most output tokens: `wanted`, or `default` as far as there is room. Lengths are in tokens.

    Raises ApiError that names `field`, the prompt's, or `limit_field`, whichever is too long.
    """
    status, code, most, of = 400, "context_length_exceeded", context, f"the model's context of {context}"
    if context > MAX_REQUEST_TOKENS:
        status, code, most = 413, "request_too_large", MAX_REQUEST_TOKENS
        of = f"the {most} that prompt and output of a request may have"
    room = most - prompt
    if room < 1:
        raise ApiError(status, code, f"{field}: {prompt} tokens leave no room in {of}", field)
    if wanted is None:
        return min(default, room)
    if wanted > room:
        message = f"{limit_field}: {prompt} prompt tokens and {wanted} more exceed {of}"
        raise ApiError(status, code, message, limit_field)
    return wanted
