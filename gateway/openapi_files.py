"""What the operations of /v1/files take and answer."""

from gateway.api.file_form import MAX_EXPIRES_S, MIN_EXPIRES_S
from gateway.api.files import FILES_URL, PURPOSES
from gateway.openapi_described import (
    ALWAYS,
    COUNT,
    TEXT,
    WITH_BODY,
    WITH_KEY,
    Described,
    answer_object,
    json_object,
    list_of,
    one,
)
from schemas.api.batches import PURPOSE

_FILE = answer_object(
    id=TEXT,
    object=one("file"),
    bytes=COUNT,
    created_at=COUNT,
    expires_at=COUNT,
    filename=TEXT,
    purpose={"enum": list(PURPOSES)},
    status=one("processed"),
)
_FILE_FORM = {
    **json_object(
        "file",
        "purpose",
        file={"type": "string", "format": "binary"},
        purpose=one(PURPOSE),
        **{
            "expires_after[anchor]": one("created_at"),
            "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRES_S, "maximum": MAX_EXPIRES_S},
        },
    ),
    "additionalProperties": False,
}

DESCRIBED_FILES: dict[tuple[str, str], Described] = {
    ("POST", FILES_URL): Described(
        "Upload a file with the lines of a batch",
        _FILE,
        statuses=(*ALWAYS, *WITH_KEY, *WITH_BODY),
        form=_FILE_FORM,
    ),
    ("GET", FILES_URL): Described(
        "List the files",
        answer_object(
            "first_id", "last_id", object=one("list"), data=list_of(_FILE), has_more={"type": "boolean"}
        ),
        parameters=("after", "limit", "order", "purpose"),
    ),
    ("GET", f"{FILES_URL}/{{id}}"): Described("Describe a file", _FILE),
    ("DELETE", f"{FILES_URL}/{{id}}"): Described(
        "Delete a file",
        answer_object(id=TEXT, object=one("file"), deleted={"const": True}),
        statuses=(*ALWAYS, *WITH_KEY, 409),
    ),
    ("GET", f"{FILES_URL}/{{id}}/content"): Described(
        "Read a file; the output of a batch that runs, as far as it has come", None, jsonl=True
    ),
}
