from typing import Any

import pytest

from schemas.priority import PriorityClass
from schemas.records import Dispatch
from schemas.sampling import Grammar, LogitBias
from tests.worker_harness import make_inference_request
from workers.request_factory import make_request, request_error

NAN = float("nan")


def error_of(**fields: Any) -> str:
    wanted = make_inference_request(max_tokens=10)
    for name, value in fields.items():
        setattr(wanted.sampling if hasattr(wanted.sampling, name) else wanted, name, value)
    return request_error(wanted, "simulated", 300)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"min_p": 1.0, "presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"min_tokens": 10, "logprobs": 20, "top_k": 10**12, "temperature": 1e30, "seed": -(2**63)},
        {"stop": ["x" * 256] * 16, "stop_token_ids": [299], "logit_bias": [LogitBias(0, -100.0)]},
        {"grammar": Grammar("lark", "x" * 65_536)},
    ],
)
def test_what_lies_in_range_is_taken(fields: dict[str, Any]) -> None:
    assert error_of(**fields) == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [300]}, "stop_token_ids: ids must be 0 to 299"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids: must have at most 1024 entries, has 1025"),
        ({"min_tokens": 11}, "min_tokens: must be 0 to max_tokens (10), got 11"),
        ({"min_tokens": -1}, "min_tokens: must be 0 to max_tokens (10), got -1"),
        ({"min_p": 1.1}, "min_p: must be 0 to 1, got 1.1"),
        ({"min_p": NAN}, "min_p: must be 0 to 1, got nan"),
        ({"presence_penalty": 2.5}, "presence_penalty: must be -2 to 2, got 2.5"),
        ({"frequency_penalty": NAN}, "frequency_penalty: must be -2 to 2, got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: must be 0.01 to 100, got 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty: must be 0.01 to 100, got inf"),
        ({"logprobs": 21}, "logprobs: must be 0 to 20, got 21"),
        ({"logprobs": -1}, "logprobs: must be 0 to 20, got -1"),
        ({"top_k": 2**63}, "top_k: must be 0 (off) or more"),
        ({"logit_bias": [LogitBias(300, 1.0)]}, "logit_bias: ids must be 0 to 299"),
        ({"logit_bias": [LogitBias(7, NAN)]}, "logit_bias: must be -100 to 100, got nan for token 7"),
        ({"logit_bias": [LogitBias(7, 0.0)] * 1025}, "logit_bias: must have at most 1024 entries, has 1025"),
        ({"stop": ["a", ""]}, "stop[1]: must have 1 to 256 characters, has 0"),
        ({"stop": ["a" * 257]}, "stop[0]: must have 1 to 256 characters, has 257"),
        ({"stop": ["a"] * 17}, "stop: must have at most 16 entries, has 17"),
        (
            {"grammar": Grammar("gbnf", "x")},
            "grammar.kind: must be one of json_schema, regex, lark, got 'gbnf'",
        ),
        ({"grammar": Grammar("regex", "")}, "grammar.source: must have 1 to 65536 bytes, has 0"),
        (
            {"grammar": Grammar("regex", "é" * 32_769)},
            "grammar.source: must have 1 to 65536 bytes, has 65538",
        ),
    ],
)
def test_what_lies_outside_names_its_field(fields: dict[str, Any], message: str) -> None:
    assert error_of(**fields).startswith(message)


def test_a_request_is_made_as_the_engine_wants_it() -> None:
    wanted = make_inference_request(max_tokens=10)
    wanted.priority, wanted.output_token_ids = 1, [7, 8]
    request = make_request(Dispatch(0, 1, 20, wanted), is_valid=True)
    assert request.priority is PriorityClass.FREE
    assert request.expected_output_tokens == 20
    assert request.tenant == wanted.tenant
    request.output_token_ids.append(9)
    assert wanted.output_token_ids == [7, 8]


def test_a_request_of_no_class_can_still_be_ended() -> None:
    wanted = make_inference_request()
    wanted.priority = 9
    assert make_request(Dispatch(0, 1, 20, wanted), is_valid=False).priority is PriorityClass.BATCH
