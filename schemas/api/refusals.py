"""Every refusal there is: what a client may be told instead of an answer, and when.

The types that OpenAI's and Anthropic's clients are told follow from the status (errors.py).
"""

from typing import NamedTuple

from schemas.api.errors import ApiError


class RefusalKind(NamedTuple):
    """`code` is stable, for programs. The official clients try 408, 409, 429 and 5xx again by themselves."""

    status: int
    code: str
    when: str

    @property
    def openai_type(self) -> str:
        return ApiError(self.status, self.code, "").type

    @property
    def anthropic_type(self) -> str:
        return ApiError(self.status, self.code, "").anthropic_type


REFUSALS = (
    RefusalKind(400, "invalid_http", "what came is no HTTP request"),
    RefusalKind(400, "invalid_json", "the body is no JSON"),
    RefusalKind(400, "invalid_avro", "a batch record is no BatchRequest"),
    RefusalKind(400, "unreadable_batch", "records that a client packed together cannot be unpacked"),
    RefusalKind(400, "invalid_value", "a field has a value that does not fit"),
    RefusalKind(400, "missing_field", "a field that is required is not there"),
    RefusalKind(400, "invalid_multipart", "a file's body is no form (RFC 7578)"),
    RefusalKind(400, "too_many_lines", "the file has more lines than this gateway takes"),
    RefusalKind(400, "duplicate_custom_id", "two lines of a batch's file have one custom_id"),
    RefusalKind(400, "line_too_long", "a line of a batch's file has more bytes than a line may"),
    RefusalKind(
        400, "input_file_changed", "a batch's file is not what was checked: told in the batch's errors"
    ),
    RefusalKind(400, "unknown_field", "a field that no part of the API has, or that is not served"),
    RefusalKind(400, "unsupported_field", "a field asks for what is not served"),
    RefusalKind(400, "context_length_exceeded", "prompt and output do not fit the model's context"),
    RefusalKind(
        400, "tokens_per_minute_exceeded", "the request is larger than the tenant's limit ever allows"
    ),
    RefusalKind(400, "max_tokens_too_large", "more output tokens are asked for than the tenant may"),
    RefusalKind(400, "invalid_request", "admission finds values that no gateway lets through"),
    RefusalKind(400, "undecodable_record", "a record of inference.requests cannot be read"),
    RefusalKind(401, "missing_api_key", "no key was given"),
    RefusalKind(401, "invalid_api_key", "the key is not known"),
    RefusalKind(401, "invalid_stream_token", "the token in the URL is not for this stream, or is too old"),
    RefusalKind(401, "invalid_admin_key", "the key is not the administrators'"),
    RefusalKind(403, "tenant_disabled", "the key's tenant is disabled"),
    RefusalKind(403, "unknown_tenant", "the tenant was deleted meanwhile"),
    RefusalKind(403, "class_not_allowed", "the class is above the tenant's tier, or its limit is 0"),
    RefusalKind(403, "model_not_allowed", "the tenant may not ask for this model"),
    RefusalKind(404, "not_found", "nothing is served at this path"),
    RefusalKind(404, "tenant_not_found", "administrators: there is no such tenant"),
    RefusalKind(404, "model_not_found", "no such model"),
    RefusalKind(404, "stream_not_found", "no such stream, or another tenant's"),
    RefusalKind(404, "response_not_found", "no such response, one that was not stored, or another tenant's"),
    RefusalKind(404, "batch_not_found", "no such batch, or another tenant's"),
    RefusalKind(404, "results_not_ready", "the batch of messages has not ended"),
    RefusalKind(404, "file_not_found", "no such file, another tenant's, or its time is over"),
    RefusalKind(409, "batch_ended", "the batch has ended: it cannot be cancelled"),
    RefusalKind(409, "batch_running", "the batch of messages has not ended: it cannot be deleted"),
    RefusalKind(405, "method_not_allowed", "the path has other methods"),
    RefusalKind(408, "head_timeout", "the headers did not arrive in time"),
    RefusalKind(408, "body_timeout", "the body did not arrive in time"),
    RefusalKind(
        409,
        "idempotency_key_in_use",
        "the first request with the key cannot be read here, or was just refused",
    ),
    RefusalKind(
        410, "cancelled", "it was ended by DELETE /v1/streams/{id}, or is the first of its key and was"
    ),
    RefusalKind(409, "file_in_use", "a batch that has not ended reads or writes the file"),
    RefusalKind(410, "stream_expired", "the log no longer holds the stream"),
    RefusalKind(409, "tenant_exists", "administrators: there is a tenant of this name"),
    RefusalKind(412, "version_conflict", "administrators: the tenant or model was changed since it was read"),
    RefusalKind(413, "body_too_large", "the body is larger than this gateway takes"),
    RefusalKind(
        413, "request_too_large", "the request, with the output it asks for, is larger than the log's records"
    ),
    RefusalKind(413, "record_too_large", "a batch record has more bytes than it may, once it is unpacked"),
    RefusalKind(415, "unsupported_encoding", "the body is compressed"),
    RefusalKind(415, "unsupported_media_type", "a file is sent as multipart/form-data"),
    RefusalKind(422, "idempotency_key_reused", "the Idempotency-Key was used for another body"),
    RefusalKind(429, "budget_exceeded", "the tenant has spent its budget of the month"),
    RefusalKind(429, "concurrency_limit_exceeded", "the tenant runs as many requests as it may"),
    RefusalKind(429, "request_rate_exceeded", "the tenant sends more requests a minute than it may"),
    RefusalKind(429, "token_rate_exceeded", "the tenant uses more tokens a minute than it may"),
    RefusalKind(429, "enqueued_tokens_exceeded", "the tenant has as many batch tokens waiting as it may"),
    RefusalKind(429, "start_unreachable", "what waits ahead takes longer than the request may wait"),
    RefusalKind(429, "over_fair_share", "under overload, the tenant has more than its share waiting"),
    RefusalKind(429, "free_class_shed", "under overload, class free is not served"),
    RefusalKind(431, "headers_too_large", "URL and headers are larger, or more, than this gateway takes"),
    RefusalKind(499, "cancelled", "it was cancelled while it waited: told to owners, not to clients"),
    RefusalKind(499, "batch_cancelled", "its batch was cancelled: told in the error file, not to clients"),
    RefusalKind(500, "internal_error", "a fault of ours"),
    RefusalKind(500, "engine_error", "the engine failed at this request"),
    RefusalKind(502, "worker_lost", "the worker died, and no other could go on"),
    RefusalKind(502, "worker_cancelled", "the worker gave the request up"),
    RefusalKind(502, "engine_stalled", "the engine stood still, and no other could go on"),
    RefusalKind(502, "engine_fault", "the worker was found to compute wrong tokens; nothing is billed"),
    RefusalKind(502, "output_gap", "a part of the output was lost"),
    RefusalKind(503, "starting", "this gateway is still starting"),
    RefusalKind(503, "draining", "this gateway is being stopped and takes nothing new"),
    RefusalKind(503, "shutting_down", "this gateway was stopped before the end"),
    RefusalKind(503, "gateway_lost", "another process took this gateway's place"),
    RefusalKind(503, "broker_unavailable", "Kafka does not answer"),
    RefusalKind(503, "no_answer", "admission did not answer"),
    RefusalKind(503, "dispatch_failed", "the request could not be given to a worker"),
    RefusalKind(503, "no_worker", "no worker serves the model"),
    RefusalKind(503, "queue_full", "more waits than will be served in time"),
    RefusalKind(503, "expired", "the request waited longer than it may"),
    RefusalKind(503, "model_not_served", "this gateway does not serve the stream's model"),
    RefusalKind(503, "too_many_connections", "more connections are open than this gateway serves"),
    RefusalKind(503, "too_many_streams", "this gateway answers as many requests as it can"),
    RefusalKind(503, "too_many_streams_of_key", "it answers as many with this key as one may have"),
    RefusalKind(503, "too_many_bodies", "the bodies that are being read fill the memory they may"),
    RefusalKind(503, "object_store_unavailable", "the store that files are kept in does not answer"),
    RefusalKind(503, "too_many_replays", "this gateway reads as many streams from the log as it can"),
    RefusalKind(504, "deadline_exceeded", "it did not end in the time a request has"),
    RefusalKind(500, "answer_too_large", "a batch record's answer is larger than a record may be"),
    RefusalKind(504, "batch_expired", "it did not end in the time a batch request has"),
)
