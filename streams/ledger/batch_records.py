"""Records of the batch topics: a tenant's request in, its answer out. Pure.

In, on batch.requests.<tenant>, one of
  {"custom_id", …fields of /v1/generate…}
  {"custom_id", "method": "POST", "url", "body"}     a batch-file line
  Avro BatchRequest                                  the same, in single-object encoding

Out, on batch.results.<tenant>, in the same shape:
  {"custom_id", …the answer of /v1/generate…, "error": null}, or {"custom_id", "offset", "error": {…}}
  {"id", "custom_id", "response": {"status_code", "request_id", "body"} | null, "error": null | {…}}
  Avro BatchResult
A record that cannot be read far enough to know its shape is answered in the first, with custom_id null.
`offset` is that of the record in the request topic.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import msgspec

from schemas.api.answers import Finished, answer
from schemas.api.bodies import convert_body
from schemas.api.errors import ApiError, bad_field
from schemas.api.prepare import BODIES, GENERATE_URL, prepare
from schemas.api.tenant_rules import sampling_for
from schemas.codec import MARKER, CodecError, decode, encode
from schemas.models import LoadedModel
from schemas.priority import PriorityClass
from schemas.records import BatchRequest, BatchResult, SamplingParams, Tenant
from schemas.topics import batch_requests

MAX_CUSTOM_ID = 512
_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})


class Shape(Enum):
    GENERATE = auto()
    LINE = auto()
    AVRO = auto()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a record stands and how its answer is to look."""

    tenant: str
    offset: int
    custom_id: str | None = None
    shape: Shape = Shape.GENERATE


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A request to run. `accepted_at` is the broker's time of the record: the same after any restart."""

    source: Source
    request_id: bytes
    accepted_at: int
    url: str
    model: LoadedModel
    prompt_token_ids: list[int]
    sampling: SamplingParams


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
) -> BatchItem | BadRecord:
    """Never raises for what a tenant may have written. Tokenizes: run it in a thread.

    `rules`: the tenant's record, if it is known.
    """
    source = Source(tenant, offset)
    try:
        fields, shape = _fields(value)
        source = replace(source, shape=shape)
        custom_id = _custom_id(fields.get("custom_id"))
        source = replace(source, custom_id=custom_id)
        url, body = _url_and_body(fields, shape)
        parsed = convert_body(body, BODIES[url])
        if parsed.stream:
            raise bad_field("stream", "a batch request is never streamed")
        prepared = prepare(parsed, models)
        if prepared.priority not in (None, PriorityClass.BATCH):
            raise bad_field("priority", "a batch request is always of class batch")
        if prepared.sampling.logprobs is not None:
            raise ApiError(400, "unsupported_field", "logprobs: not supported in batch requests", "logprobs")
        if prepared.has_tools:
            raise ApiError(400, "unsupported_field", "tools: not supported in batch requests", "tools")
        sampling = prepared.sampling
        if rules is not None:
            sampling = sampling_for(rules, PriorityClass.BATCH, prepared)
    except ApiError as e:
        return BadRecord(source, e)
    request_id = request_id_of(tenant, custom_id, url, body)
    if parsed.seed is None:
        # Not random: after a restart the request must go on as the same one.
        sampling = replace(sampling, seed=int.from_bytes(request_id[:8], "big") >> 1)
    return BatchItem(
        source, request_id, timestamp_ms, url, prepared.model, prepared.prompt_token_ids, sampling
    )


def request_id_of(tenant: str, custom_id: str, url: str, body: object) -> bytes:
    """The same for a producer's own retry, which so is neither run nor billed twice.

    The body is part of it: a custom_id used again for other work is other work.
    """
    parts = (
        batch_requests(tenant),
        custom_id,
        url,
        json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":")),
    )
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()


def _fields(value: bytes | None) -> tuple[dict[str, Any], Shape]:
    if not value:
        raise ApiError(400, "invalid_json", "the record is empty")
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


def _custom_id(value: object) -> str:
    if value is None:
        raise ApiError(400, "missing_field", "custom_id: this field is required", "custom_id")
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CUSTOM_ID:
        raise bad_field("custom_id", f"must be a string of 1 to {MAX_CUSTOM_ID} characters")
    return value


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
    if not isinstance(url, str) or url not in BODIES:
        raise bad_field("url", f"use one of {', '.join(BODIES)}")
    return url, fields["body"]


def encode_answer(source: Source, request_id: bytes, url: str, finished: Finished) -> bytes:
    """The record for batch.results of a request that ended normally."""
    body = answer(url, replace(finished, request_id=request_id))
    match source.shape:
        case Shape.GENERATE:
            return msgspec.json.encode({"custom_id": source.custom_id, **body, "error": None})
        case Shape.LINE:
            response = {"status_code": 200, "request_id": request_id.hex(), "body": body}
            return _line(source, request_id, response, None)
        case Shape.AVRO:
            text = msgspec.json.encode(body).decode()
            return encode(BatchResult(_id(source, request_id), source.custom_id or "", 200, text))


def encode_error(source: Source, request_id: bytes | None, error: ApiError) -> bytes:
    """The record for batch.results of a request that did not. In the line shapes, what the API would have
    refused is a response with its status; what failed on the way is an error."""
    refused = error.status < 500
    body = error.to_dict()
    match source.shape:
        case Shape.GENERATE:
            return msgspec.json.encode(
                {"custom_id": source.custom_id, "offset": source.offset, "error": body["error"]}
            )
        case Shape.LINE if refused:
            rid = None if request_id is None else request_id.hex()
            response = {"status_code": error.status, "request_id": rid, "body": body}
            return _line(source, request_id, response, None)
        case Shape.LINE:
            return _line(source, request_id, None, {"code": error.code, "message": error.message})
        case Shape.AVRO:
            text = msgspec.json.encode(body).decode() if refused else None
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
