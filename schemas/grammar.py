"""Whether a grammar can be served, asked where it comes in: a bad one is the client's to mend."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from schemas.sampling import MAX_GRAMMAR_BYTES, Grammar


@contextmanager
def panics_as_value_errors() -> Iterator[None]:
    """llguidance panics at some grammars that are bad (1.9: where it would quote one, within a character).

    What Python then sees is no Exception, and would end whoever handles the request.
    """
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise ValueError("it is not valid, and cannot be said why") from None


def grammar_error(grammar: Grammar) -> str:
    """What is wrong with it; empty if it is well formed. Up to 50 ms for a very large schema."""
    if (size := len(grammar.source.encode())) > MAX_GRAMMAR_BYTES:
        return f"has {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken"
    # 90 ms once, for those who are asked for structured output at all.
    from llguidance import GrammarFormat, LLMatcher, grammar_from

    try:
        with panics_as_value_errors():
            source = grammar_from(cast(GrammarFormat, grammar.kind), grammar.source)
            error = LLMatcher.validate_grammar(source)
    except ValueError as e:
        error = str(e)
    return " ".join(str(error).split())
