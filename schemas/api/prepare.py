"""From a body to what the engine needs: prompt ids, sampling, class. The same for every door."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas.api.bodies import ChatCompletionBody, GenerateBody, StreamOptions
from schemas.api.choices import MAX_CHOICES, choice_seed
from schemas.api.completions import CompletionBody
from schemas.api.conversation import chat_ids
from schemas.api.errors import ApiError, bad_field
from schemas.api.prompts import (
    check_token_ids,
    check_unicode,
    completion_prompts,
    find_model,
    output_limit,
    text_ids,
)
from schemas.api.routing import Routing, routing
from schemas.api.structured import response_grammar
from schemas.api.tool_calls import CHAT_CALL, MESSAGE_CALL
from schemas.api.tools import openai_tools
from schemas.models import LoadedModel
from schemas.priority import PriorityClass
from schemas.sampling import Grammar, LogitBias, SamplingParams

DEFAULT_MAX_TOKENS = 1024
# OpenAI's.
DEFAULT_COMPLETION_TOKENS = 16
GENERATE_URL = "/v1/generate"
CHAT_COMPLETIONS_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
MESSAGES_URL = "/v1/messages"
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")

Body = GenerateBody | ChatCompletionBody | CompletionBody
BODIES: dict[str, type[GenerateBody] | type[ChatCompletionBody] | type[CompletionBody]] = {
    GENERATE_URL: GenerateBody,
    CHAT_COMPLETIONS_URL: ChatCompletionBody,
    COMPLETIONS_URL: CompletionBody,
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request. `priority` is None where the body names no class.

    `num_prompt_tokens` stays when whoever runs the request has let go of the ids. `include_usage`,
    `continuous_usage`: usage at the end of the stream, in each of its chunks. `service_tier`: to be answered.
    `has_tools`: the output is to be read for tool calls. `limit_field`: the one that names max_tokens, None
    where that is our default. `routing`: where it shall run.
    """

    url: str
    model: LoadedModel
    prompt_token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: PriorityClass | None
    stream: bool
    include_usage: bool = True
    continuous_usage: bool = False
    service_tier: str | None = None
    has_tools: bool = False
    limit_field: str | None = None
    routing: Routing = Routing()

    @property
    def call_prefix(self) -> str:
        """How the ids of its tool calls begin; empty where the output is not read for any."""
        if not self.has_tools:
            return ""
        return MESSAGE_CALL if self.url == MESSAGES_URL else CHAT_CALL


def prepare(body: Body, models: Mapping[str, LoadedModel]) -> Prepared:
    """As `prepare_choices`, where one request can have one answer. Raises ApiError that names the field."""
    choices = prepare_choices(body, models)
    if len(choices) > 1:
        field = "prompt" if getattr(body, "n", None) in (None, 1) else "n"
        message = f"{field}: a request has one answer here; send one request each"
        raise ApiError(400, "unsupported_field", message, field)
    return choices[0]


def prepare_choices(body: Body, models: Mapping[str, LoadedModel]) -> list[Prepared]:
    """One or more: of each prompt `n`, in order. Tokenizes (a millisecond per few hundred words).

    Raises ApiError that names the field.
    """
    model = find_model(body.model, models)
    match body:
        case GenerateBody():
            return [_generate(body, model)]
        case ChatCompletionBody():
            return _repeated(_chat(body, model), body.n or 1)
        case CompletionBody():
            return _completions(body, model)


def _generate(body: GenerateBody, model: LoadedModel) -> Prepared:
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "give either prompt or messages")
    if body.messages is not None:
        field, ids = "messages", chat_ids(body.messages, model)
    else:
        assert body.prompt is not None
        field, ids = "prompt", text_ids(body.prompt, model)
    context = model.spec.max_model_len
    limit = output_limit(body.max_tokens, DEFAULT_MAX_TOKENS, "max_tokens", len(ids), context, field)
    sampling = _sampling(body, model, limit, response_grammar(body.response_format, body.regex))
    sampling.min_p = body.min_p or 0.0
    sampling.min_tokens = _min_tokens(body.min_tokens, limit)
    sampling.repetition_penalty = body.repetition_penalty or 1.0
    return Prepared(
        GENERATE_URL,
        model,
        ids,
        len(ids),
        sampling,
        priority_class(body.priority),
        body.stream,
        limit_field="max_tokens" if body.max_tokens else None,
        routing=routing(body),
    )


def _chat(body: ChatCompletionBody, model: LoadedModel) -> Prepared:
    check_supported(body.unsupported())
    include_usage, continuous_usage = _usage_options(body.stream_options)
    use = openai_tools(body.tools, body.tool_choice, body.parallel_tool_calls, model)
    ids = chat_ids(body.messages, model, use and use.tools)
    wanted = body.max_completion_tokens or body.max_tokens
    limit_field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    limit = output_limit(
        wanted,
        DEFAULT_MAX_TOKENS,
        limit_field,
        len(ids),
        model.spec.max_model_len,
        "messages",
    )
    grammar = response_grammar(body.response_format)
    if use is not None:
        check_beside_tools("response_format", grammar)
        check_beside_tools("logprobs", body.logprobs)
        grammar = use.grammar
    sampling = _sampling(body, model, limit, grammar)
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "goes with logprobs: true")
    if body.logprobs:
        sampling.logprobs = body.top_logprobs or 0
    return Prepared(
        CHAT_COMPLETIONS_URL,
        model,
        ids,
        len(ids),
        sampling,
        priority_class(body.priority),
        bool(body.stream),
        include_usage,
        continuous_usage,
        # The class of a request is `priority`; a tier that is left to us is the default one.
        "default" if body.service_tier else None,
        has_tools=use is not None,
        limit_field=limit_field if wanted else None,
        routing=routing(body),
    )


def _completions(body: CompletionBody, model: LoadedModel) -> list[Prepared]:
    check_supported(body.unsupported())
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise bad_field("best_of", f"must equal n, which is {n}: all that is generated is answered")
    # Before anything is tokenized.
    if isinstance(body.prompt, list) and not any(isinstance(item, int) for item in body.prompt):
        _check_count(len(body.prompt), n)
    found = []
    for field, ids in completion_prompts(body.prompt, model):
        found += _repeated(_completion(body, model, field, ids), n)
    return found


def _repeated(prepared: Prepared, n: int) -> list[Prepared]:
    """`n` choices, with a seed each."""
    sampling = prepared.sampling
    others = [replace(sampling, seed=choice_seed(sampling.seed, i)) for i in range(1, n)]
    return [prepared, *(replace(prepared, sampling=other) for other in others)]


def _check_count(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        asked = f"{num_prompts} prompts" if n == 1 else f"{num_prompts} prompts, {n} answers each,"
        raise bad_field("prompt", f"{asked} are more than {MAX_CHOICES} answers, the most to one request")


def _completion(body: CompletionBody, model: LoadedModel, field: str, ids: list[int]) -> Prepared:
    include_usage, continuous_usage = _usage_options(body.stream_options)
    context = model.spec.max_model_len
    limit = output_limit(body.max_tokens, DEFAULT_COMPLETION_TOKENS, "max_tokens", len(ids), context, field)
    sampling = _sampling(body, model, limit, None)
    sampling.logprobs = body.logprobs
    return Prepared(
        COMPLETIONS_URL,
        model,
        ids,
        len(ids),
        sampling,
        priority_class(body.priority),
        bool(body.stream),
        include_usage,
        continuous_usage,
        limit_field="max_tokens" if body.max_tokens else None,
        routing=routing(body),
    )


def check_supported(field: str | None) -> None:
    """Raises ApiError that names `field`, which asks for what is not served; None asks for nothing."""
    if field is not None:
        raise ApiError(400, "unsupported_field", f"{field}: this is not supported", field)


def check_beside_tools(field: str, value: object) -> None:
    """Raises ApiError that names `field`, which cannot be told apart from calls."""
    if value:
        raise bad_field(field, "cannot go with tools, unless tool_choice is none")


def _usage_options(options: StreamOptions | None) -> tuple[bool, bool]:
    if options is None:
        return False, False
    if options.continuous_usage_stats and not options.include_usage:
        raise bad_field("stream_options.continuous_usage_stats", "goes with include_usage: true")
    return options.include_usage, options.continuous_usage_stats


def _sampling(body: Body, model: LoadedModel, max_tokens: int, grammar: Grammar | None) -> SamplingParams:
    vocab_size = len(model.tokenizer.token_bytes)
    return SamplingParams(
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
        stop=stop_strings(body.stop, "stop"),
        grammar=grammar,
    )


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


def stop_strings(wanted: str | list[str] | None, field: str) -> list[str]:
    """Raises ApiError that names `field`."""
    strings = [wanted] if isinstance(wanted, str) else wanted or []
    for string in strings:
        check_unicode(string, field)
    return strings


def priority_class(wanted: str | None) -> PriorityClass | None:
    """Raises ApiError that names `priority`."""
    if wanted is None:
        return None
    try:
        return PriorityClass.parse(wanted)
    except ValueError as e:
        raise bad_field("priority", str(e)) from None
