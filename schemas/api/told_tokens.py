"""The log probabilities of one output, token by token beside its text."""

from collections.abc import Sequence

from schemas.api.answers import num_shown
from schemas.api.logprobs import ToldToken
from schemas.records import Completion
from schemas.sampling import TokenLogprobs
from schemas.tokenization import Tokenizer


class ToldTokens:
    """Gives out what is shown: not the token that ended the output, nothing of a stop string.

    The tokens of a character that is not whole yet wait for the text that takes them in.
    """

    __slots__ = ("_hidden", "_ids", "_logprobs", "_num_taken", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []  # of those not taken
        self._num_taken = 0
        self._hidden = 0

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], finish_reason: str | None
    ) -> None:
        """New output tokens. Those whose log probabilities a worker left out are never given out."""
        self._ids += token_ids
        self._logprobs += logprobs[: len(token_ids)]
        self._logprobs += [None] * (len(token_ids) - len(logprobs))
        self._hidden = 1 if finish_reason == "stop" else 0

    def take(self, position: int | None, end: Completion | None) -> list[ToldToken]:
        """Those not yet taken, up to `position` or all. `end`: as far as it is known."""
        limit = len(self._ids) - self._hidden
        if end is not None and end.text_length is not None:
            limit = num_shown(self._tokenizer, self._ids, end.finish_reason, end.text_length)
        if position is not None:
            limit = min(limit, position + 1)
        count = max(0, limit - self._num_taken)
        ids = self._ids[self._num_taken : self._num_taken + count]
        pairs = zip(ids, self._logprobs[:count], strict=True)
        told = [(token_id, logprobs) for token_id, logprobs in pairs if logprobs is not None]
        del self._logprobs[:count]
        self._num_taken += count
        return told
