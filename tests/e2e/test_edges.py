"""The shortest answers and the longest prompts, in every API form over the whole stack."""

import json
from typing import Any

import httpx
import pytest

from tests.api_forms import API_FORMS, ApiForm, Said
from tests.e2e.conftest import RunningStack

CONTEXT = 32_768
PROMPT_TOKENS = 16_000
each_form = pytest.mark.parametrize("form", API_FORMS, ids=[form.path for form in API_FORMS])


def said_by(form: ApiForm, answer: httpx.Response) -> Said:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return form.whole(answer.json())
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return form.streamed([json.loads(line.removeprefix("data: ")) for line in lines])


def ask(running: RunningStack, form: ApiForm, text: str, limit: int, **changes: Any) -> httpx.Response:
    with running.client() as client:
        return client.post(form.path, json=form.body(running.model, text, limit, **changes))


@each_form
def test_one_token(simulated_stack: RunningStack, form: ApiForm) -> None:
    for stream in (False, True):
        said = said_by(form, ask(simulated_stack, form, "hi", 1, stream=stream))
        assert (said.ending, said.output_tokens, len(said.text)) == (form.by_length, 1, 1)


@each_form
def test_a_long_prompt_and_one_that_is_too_long(simulated_stack: RunningStack, form: ApiForm) -> None:
    short = said_by(form, ask(simulated_stack, form, "a", 1))
    text = "a" * (PROMPT_TOKENS - short.input_tokens + 1)
    said = said_by(form, ask(simulated_stack, form, text, 3, stream=True))
    assert (said.input_tokens, said.output_tokens, said.ending) == (PROMPT_TOKENS, 3, form.by_length)
    refused = ask(simulated_stack, form, "a" * CONTEXT, 3)
    assert refused.status_code == 400
    (field,) = form.prompt("")
    assert refused.json()["error"]["message"].startswith(f"{field}: ")


def test_an_empty_answer_of_the_real_model(gemma_stack: RunningStack) -> None:
    for form in API_FORMS[:3]:
        for stream in (False, True):
            body = {"stream": stream, "temperature": 0, "logit_bias": {"1": 100}}  # <eos>
            said = said_by(form, ask(gemma_stack, form, "hi", 8, **body))
            assert (said.text, said.ending, said.output_tokens) == ("", form.by_stop, 1)
