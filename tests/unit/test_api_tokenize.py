"""/tokenize and /detokenize: the ids that requests have, and refusals that name the field."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.api.bodies import convert_body
from schemas.api.errors import ApiError
from schemas.api.tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize
from tests.gateway_factories import MODEL, Stand

MODELS = {"simulated": MODEL}
MESSAGES = [{"role": "user", "content": "hi"}]


async def ask(path: str, **body: Any) -> tuple[int, Any]:
    call = await Stand(inline_body_bytes=60).call(path=path, body={"model": "simulated", **body}).finish()
    return call.status, call.json()


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, [256, *"hé".encode()]),
        ({"prompt": "hi", "add_special_tokens": True}, [256, *b"hi"]),
        ({"prompt": "hi", "add_special_tokens": False}, [*b"hi"]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"prompt": "x" * 100}, [256, *b"x" * 100]),
        ({"messages": MESSAGES}, [*b"<|user|>hi\n<|assistant|>"]),
        ({"prompt": "<bos>"}, [256, *b"<bos>"]),  # spelled out it is text
    ],
)
async def test_the_ids_are_those_of_a_request(body: dict[str, Any], tokens: list[int]) -> None:
    expected = {"count": len(tokens), "max_model_len": 32_768, "tokens": tokens}
    assert await ask("/tokenize", **body) == (200, expected)


async def test_ids_become_text_and_control_tokens_are_spelled_out() -> None:
    assert await ask("/detokenize", tokens=[256, *"hé".encode(), 257]) == (200, {"prompt": "<bos>hé<eos>"})
    assert await ask("/detokenize", tokens=[0xC3]) == (200, {"prompt": "\ufffd"})
    assert await ask("/detokenize", tokens=[]) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/tokenize", {}, 400, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "invalid_json", None),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model_not_found", "model"),
        ("/tokenize", {"prompt": "a", "truncate": 1}, 400, "unknown_field", "truncate"),
        ("/tokenize", {"prompt": ["a"]}, 400, "invalid_value", "prompt"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_special_tokens": True},
            400,
            "invalid_value",
            "add_special_tokens",
        ),
        ("/detokenize", {}, 400, "missing_field", "tokens"),
        ("/detokenize", {"tokens": [1, 258]}, 400, "invalid_value", "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "invalid_value", "tokens[0]"),
    ],
)
async def test_refusals_name_the_field(
    path: str, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    got, answer = await ask(path, **body)
    assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_key_is_needed(path: str) -> None:
    assert (await Stand().call(path=path, body={}, key=None).finish()).status == 401


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_text_comes_back(text: str) -> None:
    body = convert_body({"model": "simulated", "prompt": text, "add_special_tokens": False}, TokenizeBody)
    tokens = tokenize(body, MODELS)["tokens"]
    assert detokenize(DetokenizeBody("simulated", tokens), MODELS) == {"prompt": text}


def test_half_a_surrogate_is_no_text() -> None:
    with pytest.raises(ApiError) as e:
        tokenize(TokenizeBody("simulated", prompt="\ud800"), MODELS)
    assert (e.value.status, e.value.param) == (400, "prompt")
