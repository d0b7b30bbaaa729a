"""The codec: every record round-trips, broken bytes are named, schemas may evolve."""

import contextlib
import dataclasses
import json
import typing
from io import BytesIO
from pathlib import Path

import pytest
from fastavro import parse_schema, schemaless_writer
from hypothesis import given
from hypothesis import strategies as st

from schemas import records
from schemas.codec import HEADER_BYTES, MARKER, Codec, CodecError, UnknownSchemaError, _fingerprint
from schemas.token_records import TokenChunk, Tokens

AVRO_DIR = Path(records.__file__).parent / "avro"
RECORD_CLASSES = [getattr(records, p.stem) for p in sorted(AVRO_DIR.glob("*.avsc"))]

_LEAVES: dict[object, st.SearchStrategy[object]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    str: st.text(),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
}


def strategy_for(annotation: object, name: str) -> st.SearchStrategy[object]:
    if name == "request_id":
        optional = type(None) in typing.get_args(annotation)
        fixed = st.binary(min_size=16, max_size=16)
        return st.none() | fixed if optional else fixed
    if args := typing.get_args(annotation):
        if typing.get_origin(annotation) is list:
            return st.lists(strategy_for(args[0], ""), max_size=4)
        if typing.get_origin(annotation) is dict:
            return st.dictionaries(st.text(), strategy_for(args[1], ""), max_size=3)
        return st.none() | strategy_for(args[0], "")
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return record_strategy(annotation)
    return _LEAVES[annotation]


def record_strategy(cls: type) -> st.SearchStrategy[object]:
    if cls is Tokens:  # its columns belong together
        return st.builds(
            Tokens.of, _LEAVES[int], _LEAVES[int], st.lists(record_strategy(TokenChunk), max_size=4)
        )
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: strategy_for(hint, name) for name, hint in hints.items()})


@pytest.mark.parametrize("cls", RECORD_CLASSES, ids=lambda c: c.__name__)
def test_every_record_round_trips(cls: type) -> None:
    codec = Codec()

    @given(record_strategy(cls))
    def round_trip(record: object) -> None:
        assert codec.decode(codec.encode(record)) == record

    round_trip()


def _avro_fields(schema: dict[str, typing.Any], found: dict[str, list[str]]) -> None:
    if schema.get("type") == "record":
        found[schema["name"]] = [f["name"] for f in schema["fields"]]
        assert schema["doc"], f"{schema['name']} has no doc"
        for f in schema["fields"]:
            assert f["doc"], f"{schema['name']}.{f['name']} has no doc"
            kinds = f["type"] if isinstance(f["type"], list) else [f["type"]]
            for kind in kinds:
                for inner in (kind, kind.get("items") if isinstance(kind, dict) else None):
                    if isinstance(inner, dict):
                        _avro_fields(inner, found)


@pytest.mark.parametrize("cls", RECORD_CLASSES, ids=lambda c: c.__name__)
def test_dataclass_and_schema_name_the_same_fields(cls: type) -> None:
    found: dict[str, list[str]] = {}
    _avro_fields(json.loads((AVRO_DIR / f"{cls.__name__}.avsc").read_text()), found)
    for name, fields in found.items():
        assert fields == [f.name for f in dataclasses.fields(getattr(records, name))], name


def test_every_record_class_is_part_of_some_schema() -> None:
    found: dict[str, list[str]] = {}
    for path in AVRO_DIR.glob("*.avsc"):
        _avro_fields(json.loads(path.read_text()), found)
    classes = {n for n, c in vars(records).items() if dataclasses.is_dataclass(c)}
    assert classes == found.keys()


def test_header_is_the_rabin_fingerprint_of_the_canonical_form() -> None:
    # Reference value computed with the algorithm printed in the Avro specification.
    data = Codec().encode(records.Left(role="worker", slot=1, epoch=2, reason="exit 0"))
    assert data[:HEADER_BYTES] == MARKER + bytes.fromhex("42a4f227a0b8e097")


LEFT = records.Left(role="worker", slot=1, epoch=2, reason="exit 0")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begins with nothing"),
        (b'{"custom_id": 1}', "begins with 7b22"),
        (MARKER, "begins with c301"),
        (Codec().encode(LEFT)[:-1], "broken Left"),
        (Codec().encode(LEFT) + b"x", "1 bytes left over"),
    ],
)
def test_broken_bytes_are_named(data: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        Codec().decode(data)


def test_unknown_fingerprint_is_named() -> None:
    with pytest.raises(UnknownSchemaError, match="0102030405060708"):
        Codec().decode(MARKER + bytes(range(1, 9)) + b"x")


@given(st.binary(max_size=60))
def test_random_bytes_behind_a_good_header_never_escape_codec_error(body: bytes) -> None:
    codec = Codec()
    header = codec.encode(LEFT)[:HEADER_BYTES]
    with contextlib.suppress(CodecError):
        codec.decode(header + body)


def test_a_field_that_does_not_fit_names_the_record() -> None:
    with pytest.raises(CodecError, match="Left does not fit"):
        Codec().encode(records.Left(role="worker", slot="one", epoch=2, reason=""))  # type: ignore[arg-type]


def test_a_newer_writer_with_one_more_field_is_read_after_its_schema_is_learned() -> None:
    schema = json.loads((AVRO_DIR / "Left.avsc").read_text())
    schema["fields"].append({"name": "host", "type": "string", "default": "", "doc": "New."})
    text = json.dumps(schema)
    body = BytesIO()
    schemaless_writer(
        body, parse_schema(schema), {"role": "worker", "slot": 1, "epoch": 2, "reason": "exit 0", "host": "h"}
    )
    data = MARKER + _fingerprint(parse_schema(json.loads(text))) + body.getvalue()
    codec = Codec()
    with pytest.raises(UnknownSchemaError):
        codec.decode(data)
    codec.learn(text)
    assert codec.decode(data) == LEFT


def test_an_older_writer_without_an_optional_field_is_read_with_its_default() -> None:
    schema = json.loads((AVRO_DIR / "Join.avsc").read_text())
    schema["fields"] = [f for f in schema["fields"] if f["name"] != "model"]
    body = BytesIO()
    parsed = parse_schema(schema)
    schemaless_writer(body, parsed, {"role": "worker", "slot": 1, "nonce": b"n", "address": None})
    codec = Codec()
    codec.learn(json.dumps(schema))
    assert codec.decode(MARKER + _fingerprint(parsed) + body.getvalue()) == records.Join("worker", 1, b"n")


@pytest.mark.parametrize("text", ["", "{", "[]", '"int"', '{"type": "record"}'])
def test_learning_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(CodecError):
        Codec().learn(text)


def test_learning_a_foreign_record_is_refused() -> None:
    with pytest.raises(CodecError, match="Invoice"):
        Codec().learn(json.dumps({"type": "record", "name": "Invoice", "fields": []}))
