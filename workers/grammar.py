"""Structured output: which tokens a JSON schema, a regular expression or a Lark grammar allows next.

llguidance keeps the state and computes the masks. It keeps the interpreter's lock too, while it builds its
tree of the vocabulary (2 s for 262,144 tokens), so that is done at load. It compiles grammars without.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from schemas.sampling import Grammar
from schemas.tokenization import Tokenizer

_MAX_ERROR_CHARACTERS = 500
_NUM_KEPT = 64
# Up to 2 KB each, over all that a matcher meets; the library's own limit comes to hundreds of MB.
_MAX_LEXER_STATES = 20_000
# What one mask may cost while the whole batch waits: 13 ms with the worst expression that was tried (Xeon).
_STEP_FUEL = 50_000
# Between the tokens of JSON. Without an end a model that is undecided writes blanks for ever.
_JSON_WHITESPACE = r"[ \t\n\r]{0,20}"


class GrammarError(ValueError):
    """A grammar that cannot be used; the message names the field."""


class _Vocabulary:
    """What `TokenizerWrapper` asks for.

    Encoding splits text into bytes: it only serves to guess at tokens that a grammar forces, and nobody here
    asks for those.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        special = {token_id: content for content, token_id in tokenizer.special_ids.items()}
        table = tokenizer.token_bytes[:vocab_size]
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [piece or special.get(i, "").encode() for i, piece in enumerate(table)]
        self.special_token_ids = [token_id for token_id in special if token_id < vocab_size]
        self._of_byte = {piece: i for i, piece in enumerate(table) if len(piece) == 1}

    def __call__(self, text: bytes) -> list[int]:
        pieces = (bytes([byte]) for byte in text)
        return [self._of_byte[piece] for piece in pieces if piece in self._of_byte]


class GrammarConstraint:
    """A `workers.request.TokenConstraint`. Belongs to one thread at a time.

    End tokens are allowed exactly where the output is a whole word of the language, and nothing else once no
    more can follow. `error` is not empty when the matcher gave up, because the grammar is too hard to go on
    with or a token was taken that it did not allow; then only end tokens are allowed, and the request should
    be ended.
    """

    __slots__ = ("_eos_token_ids", "_matcher", "error")

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self.error = ""

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        """row: contiguous, of ceil(vocab_size / 32) words."""
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                self._note_error()
            elif not row.any():
                self.error = "grammar: no token of the vocabulary can be next"
        if self.error:
            row[:] = 0
            words = row.view(np.uint32)
            for token_id in self._eos_token_ids:
                words[token_id // 32] |= np.uint32(1 << (token_id % 32))

    def advance(self, token_id: int) -> None:
        """After the end only end tokens are allowed, and they change nothing."""
        if not self.error and not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
            self._note_error()

    def _note_error(self) -> None:
        self.error = f"grammar: {_shortened(self._matcher.get_error())}"


class GrammarCompiler:
    """Makes constraints for one vocabulary, and keeps the grammars that were used last. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Takes seconds for a large vocabulary, and keeps the interpreter's lock: not beside an engine."""
        self._eos_token_ids = list(eos_token_ids)
        vocabulary = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, self._eos_token_ids[0]))
        self._tokenizer = LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=self._eos_token_ids)
        self._limits = LLParserLimits(
            step_lexer_fuel=_STEP_FUEL, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )
        self._num_words = -(-vocab_size // 32)
        self._lock = Lock()
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def constraint(self, grammar: Grammar, output_token_ids: Sequence[int] = ()) -> GrammarConstraint:
        """A constraint that stands behind `output_token_ids`.

        Takes 0.01 ms for a grammar that is known, 1 to 10 ms for most others, some 100 ms for the hardest.
        Raises GrammarError.
        """
        with self._lock:
            matcher = self._matcher(grammar).deep_copy()
        constraint = GrammarConstraint(matcher, self._eos_token_ids)
        for token_id in output_token_ids:
            constraint.advance(token_id)
        if constraint.error:
            raise GrammarError(f"output_token_ids: they do not belong to the grammar: {constraint.error}")
        return constraint

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        key = (grammar.kind, grammar.source)
        matcher = self._compiled.pop(key, None) or self._compile(grammar)
        self._compiled[key] = matcher
        if len(self._compiled) > _NUM_KEPT:
            self._compiled.popitem(last=False)
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if grammar.kind == "json_schema":
            try:
                source = LLMatcher.grammar_from_json_schema(
                    grammar.source, defaults={"whitespace_pattern": _JSON_WHITESPACE}
                )
            except ValueError as error:
                raise GrammarError(f"grammar.source: {_shortened(str(error))}") from None
        elif grammar.kind == "regex":
            source = LLMatcher.grammar_from_regex(grammar.source)
        elif grammar.kind == "lark":
            source = LLMatcher.grammar_from_lark(grammar.source)
        else:
            raise GrammarError(f"grammar.kind: unknown kind {grammar.kind!r}")
        matcher = LLMatcher(self._tokenizer, source, limits=self._limits, log_level=0)
        # The first mask takes milliseconds: what it finds out is copied with the matcher.
        mask = np.empty(self._num_words, np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarError(f"grammar.source: {_shortened(matcher.get_error())}")
        return matcher


def _shortened(message: str) -> str:
    return " ".join(message.split())[:_MAX_ERROR_CHARACTERS]
