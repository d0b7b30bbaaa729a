"""How an operation of the API is described, and the pieces of schemas for it."""

from typing import Any, NamedTuple

import msgspec

TEXT: dict[str, Any] = {"type": "string"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
ALWAYS = (400, 408, 431, 500, 503)
WITH_KEY = (401, 403, 404)
WITH_BODY = (413, 415)
RUNNING = (409, 410, 422, 429, 502, 504)


def json_object(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def one(value: str) -> dict[str, Any]:
    return {"const": value}


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def answer_object(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """As `json_object`, with all of `properties` required, and `required` of any type."""
    return json_object(*properties, *required, **properties)


class Described(NamedTuple):
    """`answer`: the schema of a JSON answer, None where there is none. `sse`: it may be a stream of events,
    `jsonl`: it is lines of JSON. `form`: the schema of a body that is no JSON.

    `parameters` are names of `PARAMETERS`; those of the path need not be named. `runs`: it has a request
    run, which the headers of its answer tell of.
    """

    summary: str
    answer: dict[str, Any] | None
    body: type[msgspec.Struct] | None = None
    sse: bool = False
    jsonl: bool = False
    parameters: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (*ALWAYS, *WITH_KEY)
    status: int = 200
    public: bool = False
    body_required: bool = True
    admin: bool = False
    runs: bool = False
    form: dict[str, Any] | None = None
