"""As openapi_operations.py, for batches."""

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
from schemas.api.batches import BATCHES_URL, BatchBody
from schemas.api.message_batches import MESSAGE_BATCHES_URL, MessageBatchBody

_BODY = (*ALWAYS, *WITH_KEY, *WITH_BODY)
_CHANGES = (*ALWAYS, *WITH_KEY, 409)
_BOOL = {"type": "boolean"}
_BATCH = {
    "anyOf": [
        answer_object(
            "endpoint",
            "errors",
            "output_file_id",
            "error_file_id",
            "metadata",
            id=TEXT,
            object=one("batch"),
            status=TEXT,
            input_file_id=TEXT,
            completion_window=TEXT,
            created_at=COUNT,
            expires_at=COUNT,
            request_counts=answer_object(total=COUNT, completed=COUNT, failed=COUNT),
            usage=json_object("input_tokens", "output_tokens"),
        ),
        answer_object(
            "output_file_id",
            "error_file_id",
            batch_id=TEXT,
            object=one("batch"),
            status=TEXT,
            input_file_id=TEXT,
            counts=answer_object(total=COUNT, completed=COUNT, failed=COUNT, expired=COUNT, cancelled=COUNT),
            usage=answer_object(input_tokens=COUNT, cached_tokens=COUNT, output_tokens=COUNT),
        ),
        answer_object(batch_id=TEXT, status=one("queued")),
    ]
}
_MESSAGE_BATCH = answer_object(
    "ended_at",
    "cancel_initiated_at",
    "results_url",
    id=TEXT,
    type=one("message_batch"),
    processing_status={"enum": ["in_progress", "canceling", "ended"]},
    created_at=TEXT,
    expires_at=TEXT,
    request_counts=answer_object(
        processing=COUNT, succeeded=COUNT, errored=COUNT, canceled=COUNT, expired=COUNT
    ),
)

DESCRIBED_BATCHES: dict[tuple[str, str], Described] = {
    ("POST", BATCHES_URL): Described(
        "Run the lines of a file: with `endpoint` as OpenAI's API has it, else in the own shape",
        _BATCH,
        BatchBody,
        statuses=_BODY,
    ),
    ("GET", BATCHES_URL): Described(
        "List the batches, newest first",
        answer_object("first_id", "last_id", object=one("list"), data=list_of(_BATCH), has_more=_BOOL),
        parameters=("limit", "after"),
    ),
    ("GET", f"{BATCHES_URL}/{{id}}"): Described("How far a batch is", _BATCH),
    ("POST", f"{BATCHES_URL}/{{id}}/cancel"): Described("Cancel a batch", _BATCH, statuses=_CHANGES),
    ("POST", MESSAGE_BATCHES_URL): Described(
        "Create a batch of messages, as Anthropic's API has it",
        _MESSAGE_BATCH,
        MessageBatchBody,
        statuses=_BODY,
    ),
    ("GET", MESSAGE_BATCHES_URL): Described(
        "List the batches of messages, newest first",
        answer_object("first_id", "last_id", data=list_of(_MESSAGE_BATCH), has_more=_BOOL),
        parameters=("limit", "after_id", "before_id"),
    ),
    ("GET", f"{MESSAGE_BATCHES_URL}/{{id}}"): Described("How far a batch of messages is", _MESSAGE_BATCH),
    ("DELETE", f"{MESSAGE_BATCHES_URL}/{{id}}"): Described(
        "Delete a batch that has ended, with its requests and results",
        answer_object(id=TEXT, type=one("message_batch_deleted")),
        statuses=_CHANGES,
    ),
    ("POST", f"{MESSAGE_BATCHES_URL}/{{id}}/cancel"): Described(
        "Cancel a batch of messages", _MESSAGE_BATCH, statuses=_CHANGES
    ),
    ("GET", f"{MESSAGE_BATCHES_URL}/{{id}}/results"): Described(
        "The results, a line of JSON each; when the batch has ended", None, jsonl=True
    ),
}
