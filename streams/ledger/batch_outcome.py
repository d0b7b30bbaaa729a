"""How a batch request ended: its answer and, where the worker's row is not the truth, its usage. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from schemas.api.answers import Finished, answer, output_text, stop_sequence
from schemas.api.errors import ApiError
from schemas.api.logprobs import SHAPES, chat_logprobs
from schemas.api.response_object import PREFIX, created_response, ended_response
from schemas.api.told_tokens import ToldTokens
from schemas.api.tool_calls import parse_tool_calls
from schemas.priority import PriorityClass
from schemas.records import Completion, Failed, Rejected, Usage
from schemas.stream_state import StreamState
from streams.ledger.batch_item import BatchItem
from streams.ledger.open_line import ChoiceEnd, Outcome
from streams.ledger.open_request import OpenRequest

EXPIRED = ApiError(504, "batch_expired", "not finished within the time of a batch request")
TOO_LARGE = ApiError(
    413, "request_too_large", "prompt: it is larger than a record of the log may be", "prompt"
)
CANCELLED = ApiError(499, "batch_cancelled", "the batch was cancelled before this was finished")


def refused_for_now(end: Rejected) -> bool:
    """Limits, load, no worker: what another time may pass."""
    return end.status in (429, 503) and end.code != "expired"


def reopen(state: StreamState) -> bool:
    """Undoes a refusal for now, which ends nothing; False where there was none."""
    if not isinstance(state.end, Rejected) or not refused_for_now(state.end):
        return False
    state.end = state.requests_offset = None
    return True


def refused(end: Rejected) -> ApiError:
    return EXPIRED if end.code == "expired" else ApiError(end.status, end.code, end.message)


def failed(end: Failed) -> ApiError:
    """Its owner said the end."""
    known = {error.code: error for error in (EXPIRED, TOO_LARGE, CANCELLED)}
    return known.get(end.code) or ApiError(500, end.code, end.message)


def finished(request: OpenRequest, end: Completion) -> Finished:
    """What it is answered with, and billed for."""
    item, state = request.item, request.state
    tokenizer = item.model.tokenizer
    text = output_text(tokenizer, state.token_ids, end.finish_reason, end.text_length)
    stopped_by = None
    if end.text_length is not None:
        whole = tokenizer.detokenizer().push(state.token_ids)
        stopped_by = stop_sequence(whole[end.text_length :], item.sampling.stop)
    text, tool_calls = parse_tool_calls(text) if item.has_tools else (text, [])
    return Finished(
        request_id=item.request_id,
        model=state.model or item.model.spec.id,
        created_s=item.accepted_at // 1000,
        text=text,
        finish_reason=end.finish_reason,
        input_tokens=len(item.prompt_token_ids),
        cached_tokens=end.cached_tokens,
        output_tokens=len(state.token_ids),
        logprobs=_logprobs(request, end),
        service_tier=item.service_tier,
        stop_sequence=stopped_by,
        tool_calls=tool_calls,
    )


def answer_body(item: BatchItem, choices: Sequence[Finished]) -> dict[str, Any]:
    """What the API that the line is for would have answered."""
    if item.response is None:
        return answer(item.url, *choices)
    (finished,) = choices
    end = Completion(
        request_id=item.request_id,
        attempt=1,
        slot=0,
        epoch=0,
        input_tokens=finished.input_tokens,
        cached_tokens=finished.cached_tokens,
        output_tokens=finished.output_tokens,
        finish_reason=finished.finish_reason,
    )
    created = created_response(item.response, f"{PREFIX}{item.request_id.hex()}", finished.created_s)
    told = [] if finished.logprobs is None else finished.logprobs["content"]
    return ended_response(created, item.request_id, finished.model, end, finished.text, told)


def _logprobs(request: OpenRequest, end: Completion) -> dict[str, Any] | None:
    item = request.item
    if item.sampling.logprobs is None:
        return None
    told = ToldTokens(item.model.tokenizer)
    told.add(request.state.token_ids, request.logprobs, end.finish_reason)
    return SHAPES.get(item.url, chat_logprobs)(item.model.tokenizer)(told.take(None, end))


def choice_end(request: OpenRequest, outcome: Outcome) -> ChoiceEnd:
    """Of one of several all that ran are sealed: what they cost is known only when the last has ended."""
    ran = _was_run(request)
    if request.line.item.num_requests > 1:
        seal = owners_row(request, outcome) if ran else None
    else:
        seal = sealed_usage(request, outcome)
    end = request.state.end
    row = seal or (end if isinstance(end, Completion) else None)
    refused = isinstance(outcome, ApiError) and not ran and request.stopped is None
    return ChoiceEnd(outcome, seal, row, refused)


def sealed_usage(request: OpenRequest, outcome: Outcome) -> Usage | None:
    """The owner's row, or None where the worker's stands: a stray may have written one, or the last worker
    none. What no run ever had is not billed."""
    state = request.state
    if isinstance(outcome, Finished) and not state.strays:
        return None
    if not _was_run(request):
        return None
    if request.stopped is not None and isinstance(state.end, Completion) and not state.strays:
        return None
    return owners_row(request, outcome)


def told_usage(request: OpenRequest, outcome: Outcome) -> Usage:
    """What its answer says that it costs, as its owner's row."""
    row = owners_row(request, outcome)
    return row if _was_run(request) else replace(row, input_tokens=0, cached_tokens=0, output_tokens=0)


def _was_run(request: OpenRequest) -> bool:
    return request.ran or bool(request.state.token_ids)


def owners_row(request: OpenRequest, outcome: Outcome) -> Usage:
    """By the fold, where a run had it."""
    state, item = request.state, request.item
    return Usage(
        request_id=item.request_id,
        attempt=state.attempt,
        sealed=True,
        tenant=item.source.tenant,
        priority=PriorityClass.BATCH,
        model=state.model or item.model.spec.id,
        input_tokens=len(item.prompt_token_ids),
        cached_tokens=state.end.cached_tokens if isinstance(state.end, Completion) else 0,
        output_tokens=len(state.token_ids),
        finish_reason=_finish_reason(request, outcome),
        accepted_at=item.accepted_at,
        ended_at=max(state.last_sign_at, item.accepted_at),
        slot=None if state.run is None else state.run.slot,
        epoch=None if state.run is None else state.run.epoch,
    )


def _finish_reason(request: OpenRequest, outcome: Outcome) -> str:
    if isinstance(outcome, Finished):
        return outcome.finish_reason
    return "error" if request.stopped is None else "cancelled"
