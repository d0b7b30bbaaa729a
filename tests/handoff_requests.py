"""Requests for a pair of workers with roles, and what must hold when one was served."""

from typing import Any

from schemas.records import InferenceRequest
from tests.handoff_pair import Pair, expected_tokens, until
from tests.worker_harness import make_inference_request


def a_request(number: int = 0, **fields: Any) -> InferenceRequest:
    request = make_inference_request(**{"prompt_len": 100, "max_tokens": 12, **fields})
    request.prompt_token_ids = [32 + (number * 7 + i) % 90 for i in range(len(request.prompt_token_ids))]
    return request


async def is_served(pair: Pair, request: InferenceRequest, count: int = 12) -> None:
    """As one worker would have, by decode alone, and nothing is kept anywhere."""
    end = await pair.end(request)
    assert pair.decode.told(request) == expected_tokens(request, count)
    assert (end.output_tokens, end.finish_reason) == (count, "length")
    await until(lambda: pair.prefill.all_free and pair.decode.all_free)
    assert not pair.prefill.tokens.values
    assert not pair.prefill.usage.values
    [row] = pair.decode.rows(request)
    assert (row.input_tokens, row.output_tokens) == (len(request.prompt_token_ids), count)
