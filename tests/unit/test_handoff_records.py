"""Records of a handoff: what writers of before roles and pairings sent is still read, as unified."""

import json
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fastavro import parse_schema, schemaless_writer

from schemas import records
from schemas.codec import MARKER, Codec, _fingerprint
from schemas.handoff_records import WorkerRole
from schemas.kv_layout import KVLayout
from schemas.records import (
    Dispatch,
    Dispatched,
    Handoff,
    Heartbeat,
    InferenceRequest,
    Join,
    Pairing,
    SamplingParams,
    WorkerStatus,
)

AVRO_DIR = Path(records.__file__).parent / "avro"

REQUEST = InferenceRequest(b"r" * 16, 1, "acme", 0, "m", [1, 2, 3], [], SamplingParams(4), 0, 1, 0, 1000)
STATUS = WorkerStatus("m", 100, False, 10, 9, 16, 4, 0, [0, 0, 0], 0, [0, 0, 0], 0, 1.0, 2.0, 3.0)
OF_BEFORE: list[tuple[object, tuple[str, ...]]] = [
    (Dispatch(1, 2, 3, REQUEST), ("pairing",)),
    (Join("worker", 1, b"n", None, "m"), ("worker_role",)),
    (Heartbeat("worker", 1, 2, b"n", None, STATUS), ("worker_role", "kv_layout")),
    (Dispatched(b"r" * 16, 1, 5, 1, 2, "m"), ("prefill_slot", "prefill_epoch")),
    (
        Handoff(b"r" * 16, 1, 1, 2, 3, 4, 500, [7, 8], 20, 99, b"sum"),
        ("transfer_id", "layout", "first_token_logprobs", "num_cached_tokens", "content_checks"),
    ),
]


def without(schema: Any, names: tuple[str, ...]) -> Any:
    """The schema as it was before these fields, at any depth."""
    if isinstance(schema, list):
        return [without(part, names) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: [without(f, names) for f in value if f["name"] not in names]
        if key == "fields"
        else without(value, names)
        for key, value in schema.items()
    }


@pytest.mark.parametrize(("record", "new"), OF_BEFORE, ids=lambda v: type(v).__name__)
def test_records_of_writers_who_knew_no_handoff_are_read_with_defaults(
    record: Any, new: tuple[str, ...]
) -> None:
    text = (AVRO_DIR / f"{type(record).__name__}.avsc").read_text()
    old = json.dumps(without(json.loads(text), new))
    assert old != json.dumps(json.loads(text))
    parsed = parse_schema(json.loads(old), named_schemas={})
    body = BytesIO()
    schemaless_writer(body, parsed, asdict(record))
    codec = Codec()
    codec.learn(old)
    assert codec.decode(MARKER + _fingerprint(parsed) + body.getvalue()) == record


def test_a_worker_of_before_is_a_unified_one_and_its_dispatch_has_no_pairing() -> None:
    assert STATUS.worker_role == Join("worker", 1, b"n").worker_role == WorkerRole.UNIFIED
    assert Dispatch(1, 2, 3, REQUEST).pairing is None


def test_a_pairing_and_a_layout_survive_the_codec() -> None:
    codec = Codec()
    paired = Dispatch(1, 2, 3, REQUEST, Pairing(b"t" * 16, 4, 77, 50, 2000))
    assert codec.decode(codec.encode(paired)) == paired
    layout = KVLayout(16, "bfloat16", 2, 18, 4, 256, "deterministic")
    beat = Heartbeat("worker", 1, 2, b"n", None, replace(STATUS, kv_layout=layout))
    assert codec.decode(codec.encode(beat)) == beat
