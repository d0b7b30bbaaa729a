from typing import Any

from schemas.sampling import Grammar
from schemas.tokenization import Tokenizer
from tests.engine_factories import make_request
from workers.live_requests import End
from workers.request import FinishReason, Request
from workers.text_rules import TextRules

RULES = TextRules(Tokenizer.simulated(), 258, [257])


def request(output: str = "", **sampling: Any) -> Request:
    return make_request(max_tokens=50, output_token_ids=list(output.encode()), **sampling)


def test_a_plain_request_gets_nothing() -> None:
    one = request()
    assert RULES.apply(one) is None
    assert one.stop_checker is None
    assert one.constraint is None


def test_a_resumed_request_holds_what_the_first_attempt_held() -> None:
    one = request("abcEN", stop=["END"])
    assert RULES.apply(one) is None
    assert one.stop_checker is not None
    assert one.stop_checker.num_held == 2
    assert one.stop_checker.push(ord("D")) == 3


def test_a_resumed_request_whose_stop_string_was_told_is_at_its_end() -> None:
    assert RULES.apply(request("abENDx", stop=["END"])) == End(FinishReason.STOP, text_length=2)


def test_a_bad_grammar_ends_the_request_with_its_field_named() -> None:
    end = RULES.apply(request(grammar=Grammar("regex", "(")))
    assert end is not None
    assert end.reason is FinishReason.ERROR
    assert end.message.startswith("grammar.source: ")


def test_a_model_without_an_end_token_has_no_grammars_but_stop_strings() -> None:
    rules = TextRules(Tokenizer.simulated(), 258, [])
    end = rules.apply(request(grammar=Grammar("regex", "a")))
    assert end is not None
    assert end.message == "grammar: the model has no end token to end it with"
    assert rules.apply(request(stop=["x"])) is None
