"""Grammars, stop strings and log probabilities on the real model and its 262,144 tokens, in fast mode."""

import json
import math
from typing import Any

import pytest

from schemas.catalog import Catalog
from schemas.sampling import Grammar
from schemas.tokenization import Tokenizer
from tests.engine_factories import make_config, make_request
from tests.model_files import MODELS_DIR, gemma_folder
from workers.engine import Engine
from workers.kv_cache_manager import make_kv_cache_manager
from workers.model_runner import TorchModelRunner
from workers.request import FinishReason, Request, RequestOutput
from workers.text_rules import TextRules

FIELDS = {"city", "people", "kind"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "kind": {"enum": ["capital", "port", "other"]},
    },
    "required": ["city", "people", "kind"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))


class Model:
    def __init__(self) -> None:
        spec = Catalog.load(MODELS_DIR).get(gemma_folder().name)
        self.tokenizer = Tokenizer.load(Catalog.load(MODELS_DIR), spec.id)
        self.runner = TorchModelRunner(
            gemma_folder() / "model.gguf",
            max_model_len=512,
            num_threads=2,
            eos_token_ids=frozenset(spec.eos_token_ids),
        )
        self.rules = TextRules(self.tokenizer, self.runner.vocab_size, spec.eos_token_ids)
        self.engine = Engine(
            make_config(max_model_len=512), self.runner, make_kv_cache_manager(200), set(spec.eos_token_ids)
        )
        self.prompt = self.tokenizer.encode_prompt("Cities as JSON. Rome: ")

    def request(self, number: int, max_tokens: int = 80, **fields: Any) -> Request:
        request = make_request(number, max_tokens=max_tokens, **fields)
        request.prompt_token_ids = self.prompt
        assert self.rules.apply(request) is None
        return request

    def run(self, *requests: Request) -> list[RequestOutput]:
        outputs = [output for request in requests for output in self.engine.add_request(request)]
        while self.engine.scheduler.has_requests:
            outputs += self.engine.step()[1]
        return outputs

    def text(self, token_ids: list[int]) -> str:
        return self.tokenizer.detokenizer().push(token_ids)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def check_json(text: str) -> None:
    value = json.loads(text)
    assert set(value) == FIELDS
    assert isinstance(value["city"], str)
    assert len(value["city"]) <= 12
    assert 0 <= value["people"] <= 99_999_999
    assert value["kind"] in {"capital", "port", "other"}


def test_sampled_outputs_are_json_by_the_schema_also_after_a_resume_anywhere(model: Model) -> None:
    requests = [
        model.request(seed, seed=seed, temperature=temperature, grammar=GRAMMAR)
        for seed, temperature in enumerate([0.0, 0.7, 1.2])
    ]
    model.run(*requests, model.request(99, max_tokens=20, seed=1))
    for request in requests:
        assert request.finish_reason is FinishReason.STOP
        check_json(model.text(request.output_token_ids))
    whole = requests[2].output_token_ids
    resumed = [
        model.request(100 + position, seed=2, attempt=2, grammar=GRAMMAR, output_token_ids=whole[:position])
        for position in range(1, len(whole), 6)
    ]
    model.run(*resumed)
    for request in resumed:
        assert request.finish_reason is FinishReason.STOP
        check_json(model.text(request.output_token_ids))


def test_a_stop_string_ends_an_output_and_nothing_of_it_was_told_before(model: Model) -> None:
    free = model.request(1, max_tokens=40, temperature=0)
    model.run(free)
    text = model.text(free.output_token_ids)
    middle = len(text) // 2
    stop = text[middle : middle + 4]
    cut = text.index(stop)
    stopped = model.request(2, max_tokens=40, temperature=0, stop=["never to be seen", stop])
    told: list[int] = []
    for output in model.run(stopped):
        assert len(model.text(told)) <= cut
        assert output.position == len(told)
        told += output.token_ids
        end = output
    assert stopped.finish_reason is FinishReason.STOP
    assert end.text_length == cut
    assert model.text(told)[:cut] == text[:cut]


def test_log_probabilities_are_told_for_every_token(model: Model) -> None:
    request = model.request(3, max_tokens=6, temperature=0, logprobs=3)
    logprobs = [each for output in model.run(request) for each in output.logprobs]
    assert len(logprobs) == 6
    for token_id, each in zip(request.output_token_ids, logprobs, strict=True):
        assert each.top_token_ids[0] == token_id
        assert each.logprob == pytest.approx(each.top_logprobs[0], abs=1e-9)
        assert each.top_logprobs == sorted(each.top_logprobs, reverse=True)
        assert sum(map(math.exp, each.top_logprobs)) <= 1 + 1e-6


def test_min_tokens_keeps_the_end_away_where_the_grammar_has_another_way(model: Model) -> None:
    grammar = Grammar("regex", "[ab]{1,12}")
    request = model.request(4, max_tokens=30, min_tokens=6, temperature=0, grammar=grammar)
    model.run(request)
    text = model.text(request.output_token_ids)
    assert 1 <= len(text) <= 12
    assert set(text) <= {"a", "b"}
    assert len(request.output_token_ids) > 6 or len(text) == 12
