"""How often a request's tokens occurred, kept from token to token for the penalties."""

from array import array
from collections.abc import Sequence


class TokenCounts:
    """Distinct tokens in order of first occurrence, and how often the output holds each.

    `token_ids` and `counts` are parallel int32 arrays; a count of 0 means that only the prompt holds it.
    """

    __slots__ = ("_index", "_num_output_tokens", "counts", "token_ids")

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        """`prompt_token_ids`: empty where only the output counts."""
        self._index = {token_id: i for i, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self.token_ids = array("i", self._index)
        self.counts = array("i", bytes(self.token_ids.itemsize * len(self._index)))
        self._num_output_tokens = 0

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Counts what was added since the last call: one token a step, all of them after a resume."""
        for position in range(self._num_output_tokens, len(output_token_ids)):
            token_id = output_token_ids[position]
            index = self._index.get(token_id)
            if index is None:
                self._index[token_id] = len(self.token_ids)
                self.token_ids.append(token_id)
                self.counts.append(1)
            else:
                self.counts[index] += 1
        self._num_output_tokens = len(output_token_ids)
