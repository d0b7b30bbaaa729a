"""How long an answer will be: a quantile per tenant and model, learned from usage rows.

Lengths are counted in buckets whose bounds grow by a fixed factor, so that a quantile is known to a fixed
relative error in bounded memory (Masson, Rim, Lee: "DDSketch: A fast and fully-mergeable quantile sketch
with relative-error guarantees", VLDB 2019, section 2). Counts are halved when a window is full: what was
long ago fades. A quantile and not the mean: what is expected too short takes blocks that others were
promised, and lengths are skewed.
"""

import math
from collections import OrderedDict

from schemas.records import InferenceRequest

# Bounds of neighbouring buckets: a quantile is off by at most 10 %, and 64 buckets reach 160,000 tokens.
GROWTH = 1.21
NUM_BUCKETS = 64
# So many answers are counted in full; the counts are halved then.
WINDOW = 256
# Fewer answers of a tenant say less than those of all tenants with the model.
MIN_ANSWERS = 8
# Before any answer of a model was seen.
FIRST_GUESS = 256
DEFAULT_QUANTILE = 0.7

_LOG_GROWTH = math.log(GROWTH)


class LengthSketch:
    """Lengths in tokens, 1 and more. `count` is weighted: old ones count half, a quarter, …"""

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self.count = 0
        self._buckets: dict[int, int] = {}

    def add(self, length: int) -> None:
        bucket = min(NUM_BUCKETS - 1, math.ceil(math.log(max(1, length)) / _LOG_GROWTH))
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        if self.count >= WINDOW:
            self._buckets = {b: n // 2 for b, n in self._buckets.items() if n > 1}
            self.count = sum(self._buckets.values())

    def quantile(self, q: float) -> float:
        """The length that a share `q` of all do not exceed, within 10 %. Raises ValueError when empty."""
        if not self.count:
            raise ValueError("no length was seen")
        rank = q * (self.count - 1)
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen > rank:
                # In the middle of its bounds, by the paper's rule: equally far from both, relatively.
                return 2 * GROWTH**bucket / (1 + GROWTH)
        raise AssertionError("the counts of all buckets are `count`")


class OutputPredictor:
    """Remembers at most `max_keys` pairs of tenant and model, those used last; `quantile` is in 0 … 1."""

    def __init__(self, quantile: float = DEFAULT_QUANTILE, max_keys: int = 10_000) -> None:
        self._quantile = quantile
        self._max_keys = max_keys
        self._sketches: OrderedDict[tuple[str, str], LengthSketch] = OrderedDict()
        self._known: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._sketches)

    def observe(self, tenant: str, model: str, output_tokens: int) -> None:
        """An answer that came to its own end had `output_tokens`."""
        for key in ((tenant, model), ("", model)):
            sketch = self._sketches.get(key)
            if sketch is None:
                sketch = self._sketches[key] = LengthSketch()
                if len(self._sketches) > self._max_keys:
                    self._known.pop(self._sketches.popitem(last=False)[0], None)
            else:
                self._sketches.move_to_end(key)
            sketch.add(output_tokens)
            self._known.pop(key, None)

    def expect(self, tenant: str, model: str, max_tokens: int) -> int:
        """Output tokens expected, 1 … max_tokens: by the tenant, else by the model, else a guess."""
        guess = self._look_up((tenant, model), MIN_ANSWERS) or self._look_up(("", model), 1)
        return max(1, min(guess or FIRST_GUESS, max_tokens))

    def expect_rest(self, request: InferenceRequest) -> int:
        """Output tokens expected of the request beyond those that it brings; at least 1."""
        expected = self.expect(request.tenant, request.model, request.sampling.max_tokens)
        return max(1, expected - len(request.output_token_ids))

    def _look_up(self, key: tuple[str, str], min_answers: int) -> int | None:
        known = self._known.get(key)
        if known is not None:
            return known
        sketch = self._sketches.get(key)
        if sketch is None or sketch.count < min_answers:
            return None
        found = self._known[key] = max(1, round(sketch.quantile(self._quantile)))
        return found
