import json
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from schemas.sampling import Grammar
from schemas.tokenization import Tokenizer
from workers.grammar import GrammarCompiler, GrammarConstraint, GrammarError

TOKENIZER = Tokenizer.simulated()
EOS = 257
COMPILER = GrammarCompiler(TOKENIZER, 258, [EOS])
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
)


def allowed(constraint: GrammarConstraint) -> list[int]:
    row = np.full(9, -1, np.int32)
    constraint.fill_bitmask(row)
    found: list[int] = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found


def walk(constraint: GrammarConstraint, choices: random.Random, most: int = 400) -> Iterator[int]:
    """Random allowed tokens up to the end token."""
    for _ in range(most):
        token_id = choices.choice(allowed(constraint))
        constraint.advance(token_id)
        yield token_id
        if token_id == EOS:
            return
    raise AssertionError("no end came")


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.detokenizer().push(token_ids)


def test_the_end_is_allowed_exactly_where_the_output_is_complete() -> None:
    constraint = COMPILER.constraint(Grammar("regex", "ab+c?"))
    seen = []
    for character in "abbc":
        seen.append(allowed(constraint))
        constraint.advance(ord(character))
    seen.append(allowed(constraint))
    constraint.advance(EOS)
    constraint.advance(EOS)
    seen.append(allowed(constraint))
    b, c = ord("b"), ord("c")
    assert seen == [[ord("a")], [b], [b, c, EOS], [b, c, EOS], [EOS], [EOS]]
    assert constraint.error == ""


@pytest.mark.parametrize("seed", range(12))
def test_any_walk_through_a_schema_is_json_by_the_schema(seed: int) -> None:
    tokens = list(walk(COMPILER.constraint(SCHEMA), random.Random(seed)))
    value = json.loads(text_of(tokens))
    assert set(value) <= {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert 0 <= value["age"] <= 150
    assert set(value.get("tags", [])) <= {"a", "b"}


def test_a_lark_grammar_and_an_expression_hold() -> None:
    lark = Grammar("lark", 'start: pair ("," pair)*\npair: /[a-z]{1,3}/ "=" /[0-9]/')
    for seed in range(5):
        assert re.fullmatch(
            r"[a-z]{1,3}=\d(,[a-z]{1,3}=\d)*",
            text_of(list(walk(COMPILER.constraint(lark), random.Random(seed)))),
        )
        regex = COMPILER.constraint(Grammar("regex", r"(é|日本|[x-z]{2,4})!"))
        assert re.fullmatch(r"(é|日本|[x-z]{2,4})!", text_of(list(walk(regex, random.Random(seed)))))


def test_blanks_between_tokens_come_to_an_end() -> None:
    constraint = COMPILER.constraint(SCHEMA)
    constraint.advance(ord("{"))
    for _ in range(20):
        assert ord(" ") in allowed(constraint)
        constraint.advance(ord(" "))
    assert allowed(constraint) == [ord('"')]


@pytest.mark.parametrize("position", [0, 1, 7, 15, -1])
def test_a_resumed_constraint_stands_where_the_first_one_stood(position: int) -> None:
    tokens = list(walk(COMPILER.constraint(SCHEMA), random.Random(3)))
    position %= len(tokens)
    first = COMPILER.constraint(SCHEMA)
    for token_id in tokens[:position]:
        first.advance(token_id)
    resumed = COMPILER.constraint(SCHEMA, tokens[:position])
    for token_id in tokens[position:]:
        assert allowed(resumed) == allowed(first)
        first.advance(token_id)
        resumed.advance(token_id)


def test_constraints_of_one_grammar_do_not_disturb_each_other() -> None:
    one, other = COMPILER.constraint(SCHEMA), COMPILER.constraint(SCHEMA)
    one.advance(ord("{"))
    assert allowed(other) == [ord("{")]


def test_special_tokens_are_no_text() -> None:
    assert 256 not in allowed(COMPILER.constraint(Grammar("regex", "(.|\n)*")))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "[a-"), "grammar.source: .*unclosed character class"),
        (Grammar("regex", "(?=a)"), "grammar.source: .*look-around"),
        (Grammar("json_schema", "["), "grammar.source: EOF while parsing"),
        (Grammar("json_schema", '{"type": "objekt"}'), "grammar.source: Invalid type: objekt"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1/x"}'), "grammar.source: .*does not fetch"),
        (Grammar("lark", "start: foo"), 'grammar.source: .*unknown name: "foo"'),
        (Grammar("gbnf", "root ::= x"), "grammar.kind: unknown kind 'gbnf'"),
    ],
)
def test_a_grammar_that_cannot_be_used_names_its_field(grammar: Grammar, message: str) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match=message):
            COMPILER.constraint(grammar)


def test_output_that_is_not_of_the_grammar_is_refused_and_ends_only_this_constraint() -> None:
    grammar = Grammar("regex", "ab")
    with pytest.raises(GrammarError, match=r"^output_token_ids: "):
        COMPILER.constraint(grammar, [ord("x")])
    constraint = COMPILER.constraint(grammar)
    constraint.advance(ord("x"))
    assert constraint.error.startswith("grammar: ")
    assert allowed(constraint) == [EOS]
    assert allowed(COMPILER.constraint(grammar)) == [ord("a")]


def test_a_grammar_that_gets_too_hard_is_an_error_and_other_constraints_go_on() -> None:
    alternatives = " | ".join(f'"a{i}"' for i in range(3000))
    constraint = COMPILER.constraint(Grammar("lark", f"start: {alternatives}"))
    constraint.advance(ord("a"))
    assert "max is 2000" in constraint.error
    assert allowed(constraint) == [EOS]
    assert allowed(COMPILER.constraint(SCHEMA)) == [ord("{")]
