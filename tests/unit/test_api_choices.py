"""Several choices to one body: how many, of which prompt, with which seed and id."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.api.answers import Finished, answer
from schemas.api.bodies import ChatCompletionBody, convert_body
from schemas.api.choices import MAX_CHOICES, MAX_N, choice_request_id, choice_seed
from schemas.api.completions import CompletionBody
from schemas.api.errors import ApiError
from schemas.api.prepare import CHAT_COMPLETIONS_URL, COMPLETIONS_URL, Prepared, prepare, prepare_choices
from tests.gateway_factories import MODEL

MODELS = {"simulated": MODEL}
CHAT: dict[str, Any] = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]}


def completions(**changes: Any) -> list[Prepared]:
    body = {"model": "simulated", "prompt": "hi", **changes}
    return prepare_choices(convert_body(body, CompletionBody), MODELS)


def chats(**changes: Any) -> list[Prepared]:
    return prepare_choices(convert_body({**CHAT, **changes}, ChatCompletionBody), MODELS)


@pytest.mark.parametrize("n", [None, 1, 2, MAX_N])
def test_n_requests_that_differ_in_their_seed_alone(n: int | None) -> None:
    for found in (chats(n=n, seed=7, max_tokens=3), completions(n=n, seed=7, best_of=n)):
        assert len(found) == (n or 1)
        assert found[0].sampling.seed == 7
        assert len({each.sampling.seed for each in found}) == len(found)
        for each in found:
            each.sampling.seed = 7
            assert each == found[0]


def test_each_prompt_has_its_n_choices_in_order() -> None:
    found = completions(prompt=["ab", "ab", "c"], n=2, seed=7)
    assert [bytes(each.prompt_token_ids[1:]) for each in found] == [b"ab", b"ab", b"ab", b"ab", b"c", b"c"]
    # Every prompt is answered as if it were alone.
    assert [each.sampling.seed for each in found] == [7, choice_seed(7, 1)] * 3
    assert [each.prompt_token_ids for each in completions(prompt=[[1, 2], [3]])] == [[1, 2], [3]]
    assert len(completions(prompt=["x"] * MAX_CHOICES)) == MAX_CHOICES


def test_the_same_prompt_twice_without_a_seed_has_two() -> None:
    first, second = completions(prompt=["ab", "ab"])
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        (ChatCompletionBody, {**CHAT, "n": 2}, "n"),
        (CompletionBody, {"model": "simulated", "prompt": ["a", "b"]}, "prompt"),
        (CompletionBody, {"model": "simulated", "prompt": ["a"], "n": 2}, "n"),
    ],
)
def test_where_a_request_has_one_answer_more_are_refused(kind: Any, changes: Any, field: str) -> None:
    with pytest.raises(ApiError) as e:
        prepare(convert_body(changes, kind), MODELS)
    assert (e.value.status, e.value.code, e.value.param) == (400, "unsupported_field", field)


@given(st.binary(min_size=16, max_size=16), st.integers(-(2**63), 2**63 - 1))
def test_ids_and_seeds_of_choices_differ_and_are_the_same_each_time(request_id: bytes, seed: int) -> None:
    ids = [choice_request_id(request_id, index) for index in range(MAX_CHOICES)]
    assert ids[0] == request_id
    assert len(set(ids)) == MAX_CHOICES
    assert {len(each) for each in ids} == {16}
    assert ids == [choice_request_id(request_id, index) for index in range(MAX_CHOICES)]
    seeds = [choice_seed(seed, i) for i in range(MAX_N)]
    assert len({*seeds, choice_seed(seed ^ 1, 1)}) == MAX_N + 1
    assert seeds[0] == seed
    assert all(0 <= each < 2**63 for each in seeds[1:])


@pytest.mark.parametrize("url", [CHAT_COMPLETIONS_URL, COMPLETIONS_URL])
def test_an_answer_of_several_choices_tells_the_sum_of_what_is_billed(url: str) -> None:
    first = Finished(bytes(16), "m", 5, "a", "stop", 33, 0, 2)
    second = Finished(bytes([1] * 16), "m", 6, "b", "length", 33, 32, 4)
    said = answer(url, first, second)
    assert said["id"].endswith("-" + "0" * 32)
    assert said["created"] == 5
    assert [choice["index"] for choice in said["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in said["choices"]] == ["stop", "length"]
    texts = [choice.get("text") or choice["message"]["content"] for choice in said["choices"]]
    assert texts == ["a", "b"]
    assert said["usage"] == {
        "prompt_tokens": 66,
        "completion_tokens": 6,
        "total_tokens": 72,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
    assert answer(url, first)["choices"] == said["choices"][:1]
