"""Structured output in request bodies: from `response_format` or `regex` to a grammar."""

import json
from typing import Any, Literal

from msgspec import Struct

from schemas.api.errors import bad_field
from schemas.grammar import grammar_error
from schemas.sampling import Grammar


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    """OpenAI's `json_schema` object. The schema is always kept to, `strict` or not."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def response_grammar(wanted: ResponseFormat | None, regex: str | None = None) -> Grammar | None:
    """None where the output is free. Raises ApiError that names the field."""
    if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise bad_field("response_format.json_schema", "goes with type json_schema, and only with it")
    if wanted is None or wanted.type == "text":
        return None if regex is None else checked_grammar(Grammar("regex", regex), "regex")
    if regex is not None:
        raise bad_field("regex", "give either regex or response_format")
    schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema
    field = "response_format" if wanted.json_schema is None else "response_format.json_schema.schema"
    return schema_grammar({} if schema is None else schema, field)


def schema_grammar(schema: dict[str, Any], field: str) -> Grammar:
    """JSON that keeps to `schema`. Raises ApiError that names `field`."""
    source = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return checked_grammar(Grammar("json_schema", source), field)


def checked_grammar(grammar: Grammar, field: str) -> Grammar:
    """`grammar`. Raises ApiError that names `field` where it cannot be served."""
    try:
        grammar.source.encode()
    except UnicodeEncodeError:
        raise bad_field(field, "holds a lone surrogate, which is no text") from None
    if error := grammar_error(grammar):
        raise bad_field(field, error)
    return grammar
