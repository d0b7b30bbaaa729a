"""Avro single-object encoding of the records: C3 01, the schema's 64-bit Rabin fingerprint, the body.

Source: Avro specification 1.12, "Single-object encoding". A reader that meets a fingerprint it does not
know asks its registry, filled from the topic `control.schemas` (key: fingerprint in hex, value: the
schema's JSON), and resolves the writer's schema into its own.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from fastavro import parse_schema, schemaless_reader, schemaless_writer
from fastavro.schema import fingerprint, to_parsing_canonical_form

from schemas import records

MARKER = b"\xc3\x01"
HEADER_BYTES = 10
_AVRO_DIR = Path(__file__).parent / "avro"

Record = Any
_Convert = Callable[[Any], Any]


class CodecError(ValueError):
    """The bytes are not a record of ours: wrong marker, unknown schema, or a body that does not fit."""


class UnknownSchemaError(CodecError):
    """No registry entry for the writer's fingerprint."""


def _fingerprint(schema: Any) -> bytes:
    digest: str = fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    return bytes.fromhex(digest)  # fastavro prints the little-endian bytes that go on the wire


def _nested(annotation: Any) -> tuple[Any, bool] | None:
    """(record class, in a list?) of a field that holds records, else None."""
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in annotation.__args__ if a is not types.NoneType)
    in_list = typing.get_origin(annotation) is list
    item = annotation.__args__[0] if in_list else annotation
    return (item, in_list) if dataclasses.is_dataclass(item) else None


@functools.cache
def _converters(cls: Any) -> tuple[_Convert, _Convert]:
    """(record → dict, dict → record), generated once: this runs for every record on every topic."""
    hints = typing.get_type_hints(cls)
    scope: dict[str, Any] = {"cls": cls}
    to_items, from_items = [], []
    for field in dataclasses.fields(cls):
        name = field.name
        nested = _nested(hints[name])
        if nested is None:
            to_items.append(f"{name!r}: r.{name}")
            if field.default == b"":
                # Where an older writer lacks the field, fastavro gives the default as text.
                from_items.append(f"d[{name!r}] = d[{name!r}] or b''")
            continue
        scope[f"to_{name}"], scope[f"from_{name}"] = _converters(nested[0])
        if nested[1]:
            to_items.append(f"{name!r}: [to_{name}(x) for x in r.{name}]")
            from_items.append(f"d[{name!r}] = [from_{name}(x) for x in d[{name!r}]]")
        else:
            to_items.append(f"{name!r}: None if r.{name} is None else to_{name}(r.{name})")
            from_items.append(f"v = d[{name!r}]; d[{name!r}] = None if v is None else from_{name}(v)")
    body = "".join(f"    {line}\n" for line in from_items)
    source = (
        f"def to_dict(r):\n    return {{{', '.join(to_items)}}}\n"
        f"def from_dict(d):\n{body}    return cls(**d)\n"
    )
    exec(source, scope)  # the names come from our own dataclasses
    return scope["to_dict"], scope["from_dict"]


class Codec:
    """Encodes our records and decodes those of any writer whose schema is known.

    Not thread-safe while `learn` runs; encode and decode share nothing mutable.
    """

    def __init__(self) -> None:
        self._prefix: dict[type, bytes] = {}
        self._schema: dict[type, Any] = {}
        self._readers: dict[bytes, tuple[Any, type, Any]] = {}
        self._own: dict[str, type] = {}
        self._json: dict[str, str] = {}
        self._learned: dict[bytes, str] = {}
        for path in sorted(_AVRO_DIR.glob("*.avsc")):
            text = path.read_text()
            cls = getattr(records, path.stem)
            schema = parse_schema(json.loads(text), named_schemas={})
            fp = _fingerprint(schema)
            self._prefix[cls] = MARKER + fp
            self._schema[cls] = schema
            self._readers[MARKER + fp] = (schema, cls, None)
            self._own[cls.__name__] = cls
            self._json[fp.hex()] = json.dumps(json.loads(text), separators=(",", ":"))

    def schemas(self) -> dict[str, str]:
        """Fingerprint (hex) → schema JSON of all own records: what goes to `control.schemas`."""
        return dict(self._json)

    def learn(self, schema_json: str) -> None:
        """Registers another writer's schema. Raises CodecError when it is not one of our records."""
        try:
            parsed = json.loads(schema_json)
            schema = parse_schema(parsed, named_schemas={})
            name = parsed["name"].rpartition(".")[2]
        except Exception as e:
            raise CodecError(f"control.schemas holds no Avro schema: {e}") from e
        cls = self._own.get(name)
        if cls is None:
            raise CodecError(f"schema {name!r} is not a record of this system")
        prefix = MARKER + _fingerprint(schema)
        self._learned[prefix] = json.dumps(parsed, separators=(",", ":"))
        self._readers.setdefault(prefix, (schema, cls, self._schema[cls]))

    def encode(self, record: Record) -> bytes:
        """Raises CodecError naming the record when a field does not fit its schema."""
        cls: Any = type(record)
        out = BytesIO()
        try:
            out.write(self._prefix[cls])
            schemaless_writer(out, self._schema[cls], _converters(cls)[0](record))
        except KeyError:
            raise CodecError(f"{cls.__name__} has no schema in schemas/avro") from None
        except (TypeError, ValueError, AttributeError, OverflowError) as e:
            raise CodecError(f"{cls.__name__} does not fit its schema: {e}") from e
        return out.getvalue()

    def record_class(self, data: bytes) -> type | None:
        """What `decode` would return, by the header alone; None where it would raise for the header."""
        entry = self._readers.get(data[:HEADER_BYTES])
        return None if entry is None else entry[1]

    def schema_of(self, data: bytes) -> str | None:
        """The JSON of the schema that wrote `data`, by the header alone; None where it is not known."""
        prefix = data[:HEADER_BYTES]
        own = self._json.get(prefix[len(MARKER) :].hex()) if prefix.startswith(MARKER) else None
        return own or self._learned.get(prefix)

    def decode(self, data: bytes) -> Record:
        """The record in `data`. Raises UnknownSchemaError or CodecError with what was found."""
        entry = self._readers.get(data[:HEADER_BYTES])
        if entry is None:
            if data[:2] != MARKER or len(data) < HEADER_BYTES:
                raise CodecError(f"not single-object Avro: begins with {data[:10].hex() or 'nothing'}")
            raise UnknownSchemaError(f"unknown schema fingerprint {data[2:HEADER_BYTES].hex()}")
        writer, cls, reader = entry
        body = BytesIO(data)
        body.seek(HEADER_BYTES)
        try:
            value = schemaless_reader(body, writer, reader)
            record = _converters(cls)[1](value)
        except Exception as e:  # fastavro raises many kinds on broken bodies; all mean the same to a caller
            raise CodecError(f"broken {cls.__name__} record: {type(e).__name__}: {e}") from e
        if body.tell() != len(data):
            raise CodecError(f"broken {cls.__name__} record: {len(data) - body.tell()} bytes left over")
        return record


@functools.cache
def default_codec() -> Codec:
    """The process's codec."""
    return Codec()


def encode(record: Record) -> bytes:
    """`default_codec().encode(record)`."""
    return default_codec().encode(record)


def decode(data: bytes) -> Record:
    """`default_codec().decode(data)`."""
    return default_codec().decode(data)
