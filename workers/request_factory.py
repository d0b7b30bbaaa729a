"""From a dispatch to the engine's request: what is wrong with it, or the request itself. Pure."""

from collections.abc import Iterator, Sequence

from schemas.priority import PriorityClass
from schemas.records import Dispatch, InferenceRequest
from schemas.sampling import (
    GRAMMAR_KINDS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    Grammar,
    SamplingParams,
)
from workers.request import Request

# The bounds of repetition_penalty keep every penalized logit finite: an infinite one would end the worker.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
)


def make_request(dispatch: Dispatch, *, is_valid: bool) -> Request:
    """The engine's request, without what its text is checked by: see `workers.text_rules`.

    One that is not valid (see `request_error`) is only good to be ended.
    """
    wanted = dispatch.request
    return Request(
        request_id=wanted.request_id,
        attempt=wanted.attempt,
        priority=PriorityClass(wanted.priority) if is_valid else PriorityClass.BATCH,
        prompt_token_ids=wanted.prompt_token_ids,
        sampling=wanted.sampling,
        reply_partition=wanted.reply_partition,
        output_token_ids=list(wanted.output_token_ids),
        expected_output_tokens=dispatch.expected_output_tokens,
        tenant=wanted.tenant,
    )


def request_error(wanted: InferenceRequest, model: str, vocab_size: int) -> str:
    """What would break the engine, or make it serve something else than was asked for. Names the field first.

    Empty if nothing does. `model` is the one served here, with token ids below `vocab_size`.
    """
    return next(_errors(wanted, model, vocab_size), "")


def _errors(wanted: InferenceRequest, model: str, vocab_size: int) -> Iterator[str]:
    if wanted.model != model:
        yield f"model: this worker serves {model!r}, not {wanted.model!r}"
    if wanted.priority not in list(PriorityClass):
        yield f"priority: no class is called {wanted.priority}"
    sampling = wanted.sampling
    for name, ids in (
        ("prompt_token_ids", wanted.prompt_token_ids),
        ("output_token_ids", wanted.output_token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", [entry.token_id for entry in sampling.logit_bias]),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            yield f"{name}: ids must be 0 to {vocab_size - 1}"
    yield from _number_errors(sampling)
    yield from _list_errors(sampling)
    if sampling.grammar is not None:
        yield from _grammar_errors(sampling.grammar)


def _number_errors(sampling: SamplingParams) -> Iterator[str]:
    if sampling.max_tokens < 1:
        yield f"max_tokens: must be at least 1, got {sampling.max_tokens}"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        yield f"min_tokens: must be 0 to max_tokens ({sampling.max_tokens}), got {sampling.min_tokens}"
    # All are written so that NaN fails too.
    if not 0.0 <= sampling.temperature < float("inf"):
        yield f"temperature: must be 0 or more, got {sampling.temperature}"
    if not 0.0 < sampling.top_p <= 1.0:
        yield f"top_p: must be above 0 and at most 1, got {sampling.top_p}"
    if not 0 <= sampling.top_k < 2**63:
        yield f"top_k: must be 0 (off) or more, got {sampling.top_k}"
    for name, least, most in _RANGES:
        value = getattr(sampling, name)
        if not least <= value <= most:
            yield f"{name}: must be {least:g} to {most:g}, got {value}"
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_TOP_LOGPROBS:
        yield f"logprobs: must be 0 to {MAX_TOP_LOGPROBS}, got {sampling.logprobs}"


def _list_errors(sampling: SamplingParams) -> Iterator[str]:
    limits: tuple[tuple[str, Sequence[object], int], ...] = (
        ("logit_bias", sampling.logit_bias, MAX_LOGIT_BIASES),
        ("stop", sampling.stop, MAX_STOP_STRINGS),
        ("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS),
    )
    for name, entries, most in limits:
        if len(entries) > most:
            yield f"{name}: must have at most {most} entries, has {len(entries)}"
    for entry in sampling.logit_bias:
        if not -100.0 <= entry.bias <= 100.0:
            yield f"logit_bias: must be -100 to 100, got {entry.bias} for token {entry.token_id}"
    for index, string in enumerate(sampling.stop):
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            yield f"stop[{index}]: must have 1 to {MAX_STOP_CHARACTERS} characters, has {len(string)}"


def _grammar_errors(grammar: Grammar) -> Iterator[str]:
    if grammar.kind not in GRAMMAR_KINDS:
        yield f"grammar.kind: must be one of {', '.join(GRAMMAR_KINDS)}, got {grammar.kind[:40]!r}"
    size = len(grammar.source.encode())
    if not 1 <= size <= MAX_GRAMMAR_BYTES:
        yield f"grammar.source: must have 1 to {MAX_GRAMMAR_BYTES} bytes, has {size}"
