"""What clients say they received, held against the log. Pure.

One JSON object a line, one line an answer:
    {"request_id": …, "status": 200, "tokens": [ids] or how many, "end": "stop"}
`request_id`: as 32 hexadecimal digits, also behind a prefix as in `chatcmpl-…`; or a stream's id. `end`:
the finish reason that came (`stop`, `length`, or `cancelled`, `error` and other codes); null where the client
left or was cut off. `tokens`: the output tokens that came, of all connections to one stream together.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from infra.audit.findings import Finding, Kind
from infra.audit.history import History
from schemas.records import Completion

_HEX_END = re.compile(r"[0-9a-f]{32}$")
# A public id of a stream: where the 16 bytes of its request_id lie (gateway/public_id.py).
_STREAM_ID = re.compile(r"[A-Za-z0-9_-]{64}")
_STREAM_REQUEST = slice(17, 33)
_NORMAL_ENDS = frozenset({"stop", "length"})
_REFUSALS = frozenset({429, 503})


class ClientRecordError(ValueError):
    """A line that is none of these records; the message names line and field."""


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    request_id: str
    status: int
    tokens: list[int] | int = 0
    end: str | None = None


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """`token_ids` is None where only their number is known."""

    request_id: bytes
    status: int
    num_tokens: int
    token_ids: list[int] | None
    end: str | None


def read_client_records(lines: Iterable[bytes]) -> dict[bytes, list[ClientRecord]]:
    """By request_id: one that several clients read has several. Raises ClientRecordError."""
    records: dict[bytes, list[ClientRecord]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = msgspec.json.decode(line, type=_Line)
            request_id = request_id_in(said.request_id)
        except (msgspec.MsgspecError, ValueError) as e:
            is_json = isinstance(e, msgspec.ValidationError) or not isinstance(e, msgspec.DecodeError)
            what = str(e) if is_json else f"not valid JSON: {e}"
            raise ClientRecordError(f"client records, line {number}: {what}") from None
        ids = said.tokens if isinstance(said.tokens, list) else None
        count = said.tokens if isinstance(said.tokens, int) else len(said.tokens)
        record = ClientRecord(request_id, said.status, count, ids, said.end)
        records.setdefault(request_id, []).append(record)
    return records


def request_id_in(text: str) -> bytes:
    """The request_id that an id in an answer holds. Raises ValueError."""
    if _STREAM_ID.fullmatch(text):
        try:
            return base64.urlsafe_b64decode(text)[_STREAM_REQUEST]
        except binascii.Error:
            pass
    if (found := _HEX_END.search(text)) is None:
        raise ValueError(f"request_id: {text[:80]!r} ends in no 32 hexadecimal digits and is no stream's id")
    return bytes.fromhex(found[0])


def judge_client(record: ClientRecord, history: History | None) -> Iterator[Finding]:
    """`history`: what the log says of it, None where it says nothing."""
    if history is None:
        if record.status == 200:
            yield Finding(Kind.NOT_IN_LOG, record.request_id.hex(), None, {"tokens": record.num_tokens})
        return
    if history.joined:
        return  # its answer is that of another request
    if record.status != 200:
        row = history.row
        if record.status in _REFUSALS and row is not None and row.output_tokens:
            yield _finding(
                Kind.REFUSED_BUT_BILLED, history, status=record.status, output_tokens=row.output_tokens
            )
        return
    end = history.state.end
    if not history.is_over:
        if record.end is not None:
            yield _finding(Kind.NO_END, history, received=record.num_tokens, told=record.end)
    elif record.end in _NORMAL_ENDS and not (isinstance(end, Completion) and end.finish_reason == record.end):
        in_log = end.finish_reason if isinstance(end, Completion) else getattr(end, "code", "none")
        yield _finding(Kind.END_DIFFERS, history, told=record.end, in_log=in_log)
    yield from _judge_tokens(record, history)


def _judge_tokens(record: ClientRecord, history: History) -> Iterator[Finding]:
    received, counted = record.num_tokens, history.num_tokens
    if received > counted:
        yield _finding(Kind.DOUBLED_TOKEN, history, seen_in="client", received=received, counted=counted)
    elif received < (least := _least(record, history)):
        yield _finding(
            Kind.DROPPED_TOKEN, history, seen_in="client", received=received, counted=counted, least=least
        )
    elif record.token_ids is not None:
        ours = history.state.token_ids
        pairs = enumerate(zip(record.token_ids, ours, strict=False))
        differs = next((at for at, (theirs, own) in pairs if theirs != own), None)
        if differs is not None:
            yield _finding(Kind.WRONG_TOKEN, history, position=differs)


def _least(record: ClientRecord, history: History) -> int:
    """So many tokens must have come to who read on to this end."""
    if record.end is None:
        # It left: what lay in the log well before it asked for the end, it had.
        return history.early_tokens if history.is_cancelled else 0
    if history.has_normal_end:
        end, unstopped = history.state.end, history.state.num_unstopped
        if isinstance(end, Completion) and end.text_length is not None and unstopped is not None:
            return unstopped  # a stop string cut the text: of its last tokens nothing is shown
        return history.num_tokens
    return history.early_tokens if history.is_cancelled else history.num_tokens


def _finding(kind: Kind, history: History, **figures: int | str) -> Finding:
    return Finding(kind, history.name, history.tenant, figures)
