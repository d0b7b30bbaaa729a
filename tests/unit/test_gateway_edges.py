"""Answers of one token that is no text, in every API form, over raw ASGI."""

import json

import pytest

from tests.api_forms import API_FORMS, ApiForm, Said
from tests.gateway_factories import Stand

END_TOKEN = 257
HALF = "é".encode()[0]
each_form = pytest.mark.parametrize("form", API_FORMS, ids=[form.path for form in API_FORMS])
whole_or_streamed = pytest.mark.parametrize("stream", [False, True])


async def said_with(token_id: int, finish: str, form: ApiForm, limit: int, *, stream: bool) -> Said:
    stand = Stand()
    call = stand.call(path=form.path, body=form.body("simulated", "hi", limit, stream=stream))
    request = await stand.request()
    num_prompt_tokens = len(request.prompt_token_ids)
    assert request.sampling.max_tokens == limit
    stand.dispatched(request)
    stand.tokens(request, 0, [token_id], finish)
    stand.complete(request, 1, finish)
    await call.finish()
    assert call.status == 200
    if stream:
        lines = [line for line in call.content.splitlines() if line.startswith(b"data: {")]
        said = form.streamed([json.loads(line[6:]) for line in lines])
    else:
        said = form.whole(call.json())
    assert said.input_tokens == num_prompt_tokens
    return said


@whole_or_streamed
@each_form
async def test_an_end_token_first_is_an_empty_answer_that_counts_a_token(form: ApiForm, stream: bool) -> None:
    said = await said_with(END_TOKEN, "stop", form, 8, stream=stream)
    assert (said.text, said.ending, said.output_tokens) == ("", form.by_stop, 1)


@whole_or_streamed
@each_form
async def test_a_token_that_is_half_a_character_is_counted_and_not_shown(form: ApiForm, stream: bool) -> None:
    said = await said_with(HALF, "length", form, 1, stream=stream)
    assert (said.text, said.ending, said.output_tokens) == ("", form.by_length, 1)
