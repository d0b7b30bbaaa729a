"""Records of the batch topics: a tenant's request in, its answer out. Pure.

In, on batch.requests.<tenant>, one of
  {"custom_id", …fields of /v1/generate…}
  {"custom_id", "method": "POST", "url", "body"}     a batch-file line
  Avro BatchRequest                                  the same, in single-object encoding

Out, on batch.results.<tenant>, in the same shape:
  {"custom_id", …the answer of /v1/generate…, "error": null}, or {"custom_id", "offset", "usage", "error"}
  {"id", "custom_id", "response": {"status_code", "request_id", "body"} | null, "error": null | {…}}
  Avro BatchResult
A record that cannot be read far enough to know its shape is answered in the first, with custom_id null.
`offset` is that of the record in the request topic. A header `batch` names the batch that a record
belongs to; the answer has it too.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec

from schemas.api.batches import LINE_BODIES
from schemas.api.errors import ApiError, bad_field
from schemas.api.prepare import GENERATE_URL
from schemas.codec import MARKER, CodecError, decode, encode
from schemas.headers import BATCH
from schemas.models import LoadedModel
from schemas.records import BatchRequest, BatchResult, Tenant
from schemas.topics import MAX_RECORD_BYTES, batch_requests
from streams.ledger.batch_item import (
    MAX_GROUP,
    BatchItem,
    Shape,
    Source,
    check_custom_id,
    make_item,
)

# What a record of batch.results may have: its topic takes as much, with the key and headers beside it.
MAX_ANSWER_BYTES = (8 << 20) - (64 << 10)
_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})


class UnreadableBatch(bytes):
    """In the place of the value of a record: it stands for a whole batch, for the reason that it holds."""

    def __new__(cls, reason: str) -> Self:
        return super().__new__(cls, reason.encode(errors="replace"))


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that is answered with an error and goes to the dead-letter topic."""

    source: Source
    error: ApiError


def parse(
    value: bytes | None,
    tenant: str,
    offset: int,
    timestamp_ms: int,
    models: Mapping[str, LoadedModel],
    rules: Tenant | None = None,
    headers: Iterable[tuple[str, bytes | None]] = (),
) -> BatchItem | BadRecord:
    """Never raises for what a tenant may have written. Tokenizes: run it in a thread.

    `rules`: the tenant's record, if it is known.
    """
    group = _group(headers)
    source = Source(tenant, offset, group=None if group is None else group[:MAX_GROUP])
    try:
        fields, shape = _fields(value)
        source = replace(source, shape=shape)
        source = replace(source, custom_id=check_custom_id(fields.get("custom_id")))
        if group != source.group:
            raise bad_field(f"header {BATCH}", f"must have at most {MAX_GROUP} characters")
        url, body = _url_and_body(fields, shape)
        request_id = request_id_of(source, url, body)
        return make_item(source, request_id, timestamp_ms, url, body, models, rules)
    except ApiError as e:
        return BadRecord(source, e)


def asked_request(
    value: bytes | None, tenant: str, headers: Iterable[tuple[str, bytes | None]] = ()
) -> bytes | None:
    """The request_id of what a record asks for, without a look at the body; None where nothing can be run."""
    group = _group(headers)
    if group is not None and len(group) > MAX_GROUP:
        return None
    try:
        fields, shape = _fields(value)
        source = Source(tenant, 0, check_custom_id(fields.get("custom_id")), shape, group)
        url, body = _url_and_body(fields, shape)
    except ApiError:
        return None
    return request_id_of(source, url, body)


def _group(headers: Iterable[tuple[str, bytes | None]]) -> str | None:
    return (dict(headers).get(BATCH) or b"").decode(errors="replace") or None


def request_id_of(source: Source, url: str, body: object) -> bytes:
    """The same for a producer's own retry, which so is neither run nor billed twice.

    The body is part of it: a custom_id used again for other work is other work. So is the shape: an answer
    given once is given again as it is.
    """
    parts = (
        batch_requests(source.tenant),
        source.group,
        source.custom_id,
        source.shape.name,
        url,
        json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":")),
    )
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()


def _fields(value: bytes | None) -> tuple[dict[str, Any], Shape]:
    if not value:
        raise ApiError(400, "invalid_json", "the record is empty")
    if isinstance(value, UnreadableBatch):
        raise ApiError(400, "unreadable_batch", value.decode())
    if len(value) > MAX_RECORD_BYTES:  # its batch was compressed
        message = f"the record has {len(value):,} bytes, and may have {MAX_RECORD_BYTES:,}"
        raise ApiError(413, "record_too_large", message)
    if value.startswith(MARKER):
        return _avro_fields(value), Shape.AVRO
    try:
        fields = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(400, "invalid_json", f"the record is not valid JSON: {e}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", "the record is not a JSON object")
    return fields, Shape.LINE if fields.keys() & {"url", "body", "method"} else Shape.GENERATE


def _avro_fields(value: bytes) -> dict[str, Any]:
    try:
        record = decode(value)
    except CodecError as e:
        raise ApiError(400, "invalid_avro", str(e)) from None
    if not isinstance(record, BatchRequest):
        raise ApiError(400, "invalid_avro", f"the record is a {type(record).__name__}, not a BatchRequest")
    try:
        body = msgspec.json.decode(record.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(400, "invalid_json", f"body: not valid JSON: {e}", "body") from None
    return {
        "custom_id": record.custom_id,
        "method": record.method or "POST",
        "url": record.url or GENERATE_URL,
        "body": body,
    }


def _url_and_body(fields: dict[str, Any], shape: Shape) -> tuple[str, Any]:
    if shape is Shape.GENERATE:
        return GENERATE_URL, {name: value for name, value in fields.items() if name != "custom_id"}
    if unknown := sorted(fields.keys() - _LINE_FIELDS):
        raise ApiError(400, "unknown_field", f"{unknown[0]}: this field is not supported", unknown[0])
    for name in ("url", "body"):
        if name not in fields:
            raise ApiError(400, "missing_field", f"{name}: this field is required", name)
    if fields.get("method", "POST") != "POST":
        raise bad_field("method", "must be POST")
    url = fields["url"]
    if not isinstance(url, str) or url not in LINE_BODIES:
        raise bad_field("url", f"use one of {', '.join(LINE_BODIES)}")
    return url, fields["body"]


def encode_answer(source: Source, request_id: bytes, body: dict[str, Any]) -> bytes:
    """The record for batch.results of a request that ended normally; `body` is what its API answers."""
    value = _answer(source, request_id, body)
    if len(value) <= MAX_ANSWER_BYTES:
        return value
    message = f"the answer has {len(value):,} bytes, and a record at most {MAX_ANSWER_BYTES:,}: ask for less"
    error = ApiError(500, "answer_too_large", message)
    return encode_error(source, request_id, error, body.get("usage"))


def _answer(source: Source, request_id: bytes, body: dict[str, Any]) -> bytes:
    match source.shape:
        case Shape.GENERATE:
            return msgspec.json.encode({"custom_id": source.custom_id, **body, "error": None})
        case Shape.LINE:
            response = {"status_code": 200, "request_id": request_id.hex(), "body": body}
            return _line(source, request_id, response, None)
        case Shape.AVRO:
            text = msgspec.json.encode(body).decode()
            return encode(BatchResult(_id(source, request_id), source.custom_id or "", 200, text))


def encode_error(
    source: Source, request_id: bytes | None, error: ApiError, usage: dict[str, Any] | None = None
) -> bytes:
    """The record for batch.results of a request that did not. In the line shapes, what the API would have
    refused is a response with its status; what failed on the way is an error. `usage`: what is billed of it.
    """
    refused = error.status < 500
    body = error.to_dict() if usage is None else {**error.to_dict(), "usage": usage}
    match source.shape:
        case Shape.GENERATE:
            return msgspec.json.encode(
                {
                    "custom_id": source.custom_id,
                    "offset": source.offset,
                    "usage": usage,
                    "error": body["error"],
                }
            )
        case Shape.LINE if refused:
            rid = None if request_id is None else request_id.hex()
            response = {"status_code": error.status, "request_id": rid, "body": body}
            return _line(source, request_id, response, None)
        case Shape.LINE:
            failed: dict[str, Any] = {"code": error.code, "message": error.message}
            return _line(source, request_id, None, failed if usage is None else {**failed, "usage": usage})
        case Shape.AVRO:
            text = msgspec.json.encode(body).decode() if refused or usage is not None else None
            return encode(
                BatchResult(
                    id=_id(source, request_id),
                    custom_id=source.custom_id or "",
                    status_code=error.status if refused else None,
                    body=text,
                    error_code=error.code,
                    error_message=error.message,
                )
            )


def _line(source: Source, request_id: bytes | None, response: object, error: object) -> bytes:
    return msgspec.json.encode(
        {
            "id": _id(source, request_id),
            "custom_id": source.custom_id,
            "response": response,
            "error": error,
        }
    )


def _id(source: Source, request_id: bytes | None) -> str:
    """A request that has no id is named after its place."""
    if request_id is None:
        place = f"{batch_requests(source.tenant)}@{source.offset}"
        request_id = hashlib.blake2b(place.encode(), digest_size=16).digest()
    return f"batch_req_{request_id.hex()}"
