"""How long an answer will be: a running mean per tenant and model, from usage rows."""

from collections import OrderedDict
from dataclasses import dataclass

from schemas.records import InferenceRequest

# The mean follows the last that many answers or so.
WINDOW = 64
# Before any answer of a model was seen.
FIRST_GUESS = 256


@dataclass(slots=True)
class _Mean:
    count: int = 0
    value: float = 0.0

    def add(self, x: float) -> None:
        self.count = min(self.count + 1, WINDOW)
        self.value += (x - self.value) / self.count


class OutputPredictor:
    """Remembers at most `max_keys` pairs of tenant and model, those used last."""

    def __init__(self, max_keys: int = 10_000) -> None:
        self._max_keys = max_keys
        self._means: OrderedDict[tuple[str, str], _Mean] = OrderedDict()

    def __len__(self) -> int:
        return len(self._means)

    def observe(self, tenant: str, model: str, output_tokens: int) -> None:
        """An answer that came to its own end had `output_tokens`."""
        for key in ((tenant, model), ("", model)):
            mean = self._means.get(key)
            if mean is None:
                mean = self._means[key] = _Mean()
                if len(self._means) > self._max_keys:
                    self._means.popitem(last=False)
            else:
                self._means.move_to_end(key)
            mean.add(output_tokens)

    def expect(self, tenant: str, model: str, max_tokens: int) -> int:
        """Output tokens expected, 1 … max_tokens: the tenant's mean, else the model's, else a guess."""
        mean = self._means.get((tenant, model)) or self._means.get(("", model))
        guess = FIRST_GUESS if mean is None else round(mean.value)
        return max(1, min(guess, max_tokens))

    def expect_rest(self, request: InferenceRequest) -> int:
        """Output tokens expected of the request beyond those that it brings; at least 1."""
        expected = self.expect(request.tenant, request.model, request.sampling.max_tokens)
        return max(1, expected - len(request.output_token_ids))
