"""Requests of a batch of messages become lines while they come in, with no more than one in memory."""

import json
from collections.abc import AsyncIterator

import pytest

from gateway.message_lines import MessageLines
from schemas.api.errors import ApiError

PARAMS = {"model": "simulated", "max_tokens": 4, "messages": [{"role": "user", "content": "x" * 500}]}
PIECE = 100


async def cut(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


async def lines_of(count: int, most_bytes: int) -> list[bytes]:
    requests = [{"custom_id": str(n), "params": PARAMS} for n in range(count)]
    lines = MessageLines(most_bytes)
    body = json.dumps({"requests": requests}).encode()
    found = b"".join([piece async for piece in lines.read(cut(body))])
    assert (lines.count, lines.written) == (count, len(found))
    return found.splitlines()


async def test_a_list_may_be_longer_than_a_request() -> None:
    assert len(await lines_of(20, 1_000)) == 20


async def test_a_request_that_is_too_large_is_named_before_it_is_whole() -> None:
    with pytest.raises(ApiError, match=r"requests\.0: it is larger than 300 bytes") as refusal:
        await lines_of(1, 300)
    assert (refusal.value.status, refusal.value.code) == (413, "body_too_large")
