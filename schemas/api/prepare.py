"""From a body to what the engine needs: prompt ids, sampling, class. The same for every door."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.api.bodies import ChatCompletionBody, GenerateBody, Message
from schemas.api.errors import ApiError, bad_field
from schemas.api.structured import response_grammar
from schemas.chat_template import ChatTemplateError
from schemas.models import LoadedModel
from schemas.priority import PriorityClass
from schemas.sampling import LogitBias, SamplingParams

DEFAULT_MAX_TOKENS = 1024
GENERATE_URL = "/v1/generate"
CHAT_COMPLETIONS_URL = "/v1/chat/completions"
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")

Body = GenerateBody | ChatCompletionBody
BODIES: dict[str, type[GenerateBody] | type[ChatCompletionBody]] = {
    GENERATE_URL: GenerateBody,
    CHAT_COMPLETIONS_URL: ChatCompletionBody,
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request. `priority` is None where the body names no class."""

    url: str
    model: LoadedModel
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: PriorityClass | None
    stream: bool
    include_usage: bool


def prepare(body: Body, models: Mapping[str, LoadedModel]) -> Prepared:
    """Tokenizes (a millisecond per few hundred words). Raises ApiError that names the field."""
    model = find_model(body.model, models)
    if isinstance(body, ChatCompletionBody):
        if field := body.unsupported():
            raise ApiError(400, "unsupported_field", f"{field}: this is not supported", field)
        url, wanted = CHAT_COMPLETIONS_URL, body.max_completion_tokens or body.max_tokens
        limit_field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        ids = chat_ids(body.messages, model)
        include_usage = body.stream_options is not None and body.stream_options.include_usage
    else:
        url, wanted, limit_field = GENERATE_URL, body.max_tokens, "max_tokens"
        ids = _generate_ids(body, model)
        include_usage = True
    field = "prompt" if isinstance(body, GenerateBody) and body.prompt is not None else "messages"
    max_tokens = _max_tokens(wanted, limit_field, len(ids), model.spec.max_model_len, field)
    vocab_size = len(model.tokenizer.token_bytes)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        ignore_eos=body.ignore_eos,
        stop_token_ids=check_token_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids"),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        stop=_stop(body.stop),
        grammar=response_grammar(
            body.response_format, body.regex if isinstance(body, GenerateBody) else None
        ),
    )
    if isinstance(body, GenerateBody):
        sampling.min_p = body.min_p or 0.0
        sampling.min_tokens = _min_tokens(body.min_tokens, max_tokens)
        sampling.repetition_penalty = body.repetition_penalty or 1.0
    return Prepared(url, model, ids, sampling, _priority(body), bool(body.stream), include_usage)


def find_model(model_id: str, models: Mapping[str, LoadedModel]) -> LoadedModel:
    """Raises ApiError 404 that lists the models there are."""
    model = models.get(model_id)
    if model is None:
        known = ", ".join(sorted(models))
        message = f"model {model_id!r} does not exist; there is: {known}"
        raise ApiError(404, "model_not_found", message, "model")
    return model


def _generate_ids(body: GenerateBody, model: LoadedModel) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if body.messages is not None:
        return chat_ids(body.messages, model)
    assert body.prompt is not None
    check_unicode(body.prompt, "prompt")
    ids = model.tokenizer.encode_prompt(body.prompt)
    if not ids:
        raise bad_field("prompt", "must not be empty for this model")
    return ids


def chat_ids(messages: list[Message], model: LoadedModel) -> list[int]:
    """The prompt of a conversation. Raises ApiError that names the message."""
    if model.chat_template is None:
        raise bad_field("messages", f"model {model.spec.id} has no chat template; use prompt")
    inputs = [message.as_template_input() for message in messages]
    for i, message in enumerate(inputs):
        check_unicode(message["content"], f"messages[{i}].content")
    try:
        return model.chat_template.encode(inputs)
    except ChatTemplateError as e:
        raise bad_field("messages", str(e)) from None


def check_unicode(text: str, field: str) -> None:
    """JSON can spell half a surrogate pair; no tokenizer can read it. Raises ApiError that names `field`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_field(field, "holds a lone surrogate, which is no text") from None


def _max_tokens(wanted: int | None, limit_field: str, prompt: int, context: int, field: str) -> int:
    room = context - prompt
    if room < 1:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"{field}: {prompt} tokens leave no room in the model's context of {context}",
            field,
        )
    if wanted is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if wanted > room:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"{limit_field}: {prompt} prompt tokens and {wanted} more exceed the context of {context}",
            limit_field,
        )
    return wanted


def _min_tokens(wanted: int | None, max_tokens: int) -> int:
    if wanted is not None and wanted > max_tokens:
        raise bad_field("min_tokens", f"must be at most max_tokens, which is {max_tokens}")
    return wanted or 0


def _logit_bias(wanted: dict[str, float] | None, vocab_size: int) -> list[LogitBias]:
    biases = []
    for text, bias in (wanted or {}).items():
        # Ids as JSON has them for keys: plain digits, one spelling each.
        token_id = int(text) if _TOKEN_ID.fullmatch(text) else vocab_size
        if token_id >= vocab_size:
            raise bad_field("logit_bias", f"{text[:20]!r} is no token id; they are 0 to {vocab_size - 1}")
        biases.append(LogitBias(token_id, bias))
    return biases


def check_token_ids(token_ids: list[int], vocab_size: int, field: str) -> list[int]:
    """`token_ids`, all of them in the vocabulary. Raises ApiError that names the one that is not."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            where = f"{field}[{index}]"
            raise bad_field(where, f"{token_id} is no token id; they are 0 to {vocab_size - 1}")
    return token_ids


def _stop(wanted: str | list[str] | None) -> list[str]:
    strings = [wanted] if isinstance(wanted, str) else wanted or []
    for string in strings:
        check_unicode(string, "stop")
    return strings


def _priority(body: Body) -> PriorityClass | None:
    if body.priority is None:
        return None
    try:
        return PriorityClass.parse(body.priority)
    except ValueError as e:
        raise bad_field("priority", str(e)) from None
