"""How a batch request ended: its answer and, where the worker's row is not the truth, its usage. Pure."""

from schemas.api.answers import Finished, output_text
from schemas.api.errors import ApiError
from schemas.priority import PriorityClass
from schemas.records import Completion, Rejected, Usage
from schemas.stream_state import StreamState
from streams.ledger.batch_records import BatchItem
from streams.ledger.open_request import OpenRequest

Outcome = Finished | ApiError

EXPIRED = ApiError(504, "batch_expired", "not finished within the time of a batch request")


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


def finished(item: BatchItem, state: StreamState, end: Completion) -> Finished:
    return Finished(
        request_id=item.request_id,
        model=state.model or item.model.spec.id,
        created_s=item.accepted_at // 1000,
        text=output_text(item.model.tokenizer, state.token_ids, end.finish_reason, end.text_length),
        finish_reason=end.finish_reason,
        input_tokens=len(item.prompt_token_ids),
        cached_tokens=end.cached_tokens,
        output_tokens=len(state.token_ids),
    )


def sealed_usage(request: OpenRequest, outcome: Outcome) -> Usage | None:
    """The owner's row, or None where the worker's stands: a stray may have written one, or the last worker
    none. What no run ever had is not billed."""
    state, item = request.state, request.item
    if isinstance(outcome, Finished) and not state.strays:
        return None
    if not request.ran and not state.token_ids:
        return None
    return Usage(
        request_id=item.request_id,
        attempt=state.attempt,
        sealed=True,
        tenant=item.source.tenant,
        priority=PriorityClass.BATCH,
        model=state.model or item.model.spec.id,
        input_tokens=len(item.prompt_token_ids),
        cached_tokens=outcome.cached_tokens if isinstance(outcome, Finished) else 0,
        output_tokens=len(state.token_ids),
        finish_reason=outcome.finish_reason if isinstance(outcome, Finished) else "error",
        accepted_at=item.accepted_at,
        ended_at=max(state.last_sign_at, item.accepted_at),
        slot=None if state.run is None else state.run.slot,
        epoch=None if state.run is None else state.run.epoch,
    )
