"""What a request's text must belong to and may not hold: makes grammar constraints and stop checkers."""

from collections.abc import Sequence

from schemas.tokenization import Tokenizer
from workers.grammar import GrammarCompiler, GrammarError
from workers.live_requests import End
from workers.request import FinishReason, Request
from workers.stop_strings import StopStringChecker


class TextRules:
    """For requests of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Keeps of the tokenizer only its bytes. See `GrammarCompiler` on what this takes."""
        self._token_bytes = tokenizer.token_bytes
        self._compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids) if eos_token_ids else None

    def apply(self, request: Request) -> End | None:
        """Gives a request its checker and constraint, both behind the output of earlier attempts.

        Returns its end if it must not run: the grammar cannot be used, or the output is complete already.
        Takes microseconds without a grammar; else see `GrammarCompiler.constraint`.
        """
        sampling, output = request.sampling, request.output_token_ids
        if sampling.stop:
            checker = StopStringChecker(sampling.stop, self._token_bytes, sampling.min_tokens)
            for token_id in output:
                if (text_length := checker.push(token_id)) is not None:
                    return End(FinishReason.STOP, text_length=text_length)
            request.stop_checker = checker
        if sampling.grammar is not None:
            if self._compiler is None:
                return End(FinishReason.ERROR, "grammar: the model has no end token to end it with")
            try:
                request.constraint = self._compiler.constraint(sampling.grammar, output)
            except GrammarError as error:
                return End(FinishReason.ERROR, str(error))
        return None
