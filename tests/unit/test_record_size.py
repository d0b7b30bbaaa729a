"""No request outgrows the records of the log, whatever it asks for and however often it is tried again."""

from dataclasses import replace

import pytest
from aiokafka.errors import KafkaTimeoutError, MessageSizeTooLargeError, RecordListTooLargeError

from schemas.api.errors import ApiError
from schemas.api.prompts import output_limit
from schemas.codec import encode
from schemas.record_size import MAX_REQUEST_TOKENS, is_too_large
from schemas.records import Dispatch, Idempotency, LogitBias, SamplingParams
from schemas.sampling import (
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Grammar,
)
from schemas.topics import MAX_RECORD_BYTES
from tests.gateway_factories import inference_request

LAST_ID = (1 << 27) - 1
HUGE_CONTEXT = 1 << 24


def test_the_largest_request_fits_a_record_in_its_last_attempt_too() -> None:
    sampling = SamplingParams(
        MAX_REQUEST_TOKENS - 1,
        stop=["\U0001f600" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS,
        stop_token_ids=[LAST_ID] * MAX_STOP_TOKEN_IDS,
        logit_bias=[LogitBias(LAST_ID, 1.0)] * MAX_LOGIT_BIASES,
        grammar=Grammar("json_schema", "x" * MAX_GRAMMAR_BYTES),
    )
    asked = replace(
        inference_request(bytes(16)),
        prompt_token_ids=[LAST_ID],
        sampling=sampling,
        idempotency=Idempotency(bytes(16), bytes(16), "x" * 1_000),
        excluded_slots=[1 << 20] * 100,
        lost_epochs=[1 << 40] * 100,
    )
    # All its output but the last token was told when its last worker died.
    asked = replace(asked, attempt=4, output_token_ids=[LAST_ID] * (MAX_REQUEST_TOKENS - 2))
    record = encode(Dispatch(1 << 20, 1 << 40, 1 << 27, asked))
    assert len(record) < MAX_RECORD_BYTES - 4096  # its headers and the batch around it


def test_what_is_larger_is_refused_by_the_field_that_makes_it_so() -> None:
    most = MAX_REQUEST_TOKENS

    def limit(wanted: int | None, prompt: int) -> int:
        return output_limit(wanted, 1024, "max_tokens", prompt, HUGE_CONTEXT, "messages")

    assert limit(most - 3, 3) == most - 3
    assert limit(None, most - 3) == 3
    for wanted, prompt, field in ((most - 2, 3, "max_tokens"), (None, most, "messages")):
        with pytest.raises(ApiError) as caught:
            limit(wanted, prompt)
        error = caught.value
        assert (error.status, error.code, error.param) == (413, "request_too_large", field)
        assert error.message.startswith(f"{field}: ")


def test_kafka_says_so_of_a_record_and_of_a_batch() -> None:
    assert is_too_large(MessageSizeTooLargeError())
    assert is_too_large(RecordListTooLargeError())
    assert not is_too_large(KafkaTimeoutError())
    assert not is_too_large(TimeoutError())
