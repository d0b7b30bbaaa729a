"""What bodies say about where a request shall run, in every API."""

from typing import Any

import pytest

from schemas.api.bodies import ChatCompletionBody, GenerateBody, convert_body
from schemas.api.completions import CompletionBody
from schemas.api.errors import ApiError
from schemas.api.messages import MessagesBody
from schemas.api.responses import ResponsesBody
from schemas.api.routing import Routing, affinity_hash, routing

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = (ChatCompletionBody, {"model": "m", "messages": MESSAGES})
COMPLETION = (CompletionBody, {"model": "m", "prompt": "hi"})
GENERATE = (GenerateBody, {"model": "m", "prompt": "hi"})
ANTHROPIC = (MessagesBody, {"model": "m", "messages": MESSAGES, "max_tokens": 5})
RESPONSES = (ResponsesBody, {"model": "m", "input": "hi"})
ALL = [CHAT, COMPLETION, GENERATE, ANTHROPIC, RESPONSES]


@pytest.mark.parametrize(
    ("api", "fields", "expected"),
    [
        (CHAT, {"prompt_cache_key": "k", "user": "u"}, "k"),
        (CHAT, {"user": "u"}, "u"),
        (CHAT, {"metadata": {"user_id": "is the client's own"}}, None),
        (CHAT, {"user": ""}, None),
        (COMPLETION, {"user": "u"}, "u"),
        (ANTHROPIC, {"metadata": {"user_id": "u"}}, "u"),
        (RESPONSES, {"prompt_cache_key": "k"}, "k"),
        (GENERATE, {}, None),
    ],
)
def test_the_key_of_what_belongs_together(api: Any, fields: dict[str, Any], expected: str | None) -> None:
    kind, body = api
    assert routing(convert_body({**body, **fields}, kind)) == Routing(expected)


@pytest.mark.parametrize("api", ALL)
def test_every_api_lets_a_request_insist_on_its_model(api: Any) -> None:
    kind, body = api
    assert routing(convert_body(body, kind)).allow_fallback
    assert not routing(convert_body({**body, "allow_fallback": False}, kind)).allow_fallback
    with pytest.raises(ApiError) as refused:
        convert_body({**body, "allow_fallbacks": False}, kind)
    assert (refused.value.code, refused.value.param) == ("unknown_field", "allow_fallbacks")


def test_hashes_tell_neither_key_nor_tenant() -> None:
    assert affinity_hash("a", None) is None
    known = affinity_hash("a", "user-1")
    assert known == affinity_hash("a", "user-1")
    assert known is not None
    assert 0 <= known < 1 << 63
    assert len({known, affinity_hash("b", "user-1"), affinity_hash("a", "user-2")}) == 3
    assert affinity_hash("a", "\ud800") is not None
