"""Where a prompt's beginning is cached, by what workers say and by what was just sent there."""

from collections import OrderedDict

from schemas.prefix_sketch import DEPTHS, SKETCH_BYTES, holds, is_shared, prefix_keys
from schemas.records import InferenceRequest

# A sketch comes once a second. What was sent waits in a queue at most that many of them, then is computed
# and told of, or was evicted again.
_KEPT_SKETCHES = 8
# As many keys as a sketch has: a hundred long prompts a second, or a thousand short ones.
_MAX_SENT = 4096
_MASK = (1 << 64) - 1


class PromptPrefix:
    """A request's prefix keys (schemas/prefix_sketch.py), computed when they are first asked for."""

    __slots__ = ("_by_tenant", "_request", "_shared")

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self._by_tenant: list[int] | None = None
        self._shared: list[int] | None = None

    def keys(self, shared: bool) -> list[int]:
        """For a cache that all tenants share, or one that keeps them apart."""
        request = self._request
        if shared:
            if self._shared is None:
                self._shared = _keys(request, "")
            return self._shared
        if self._by_tenant is None:
            self._by_tenant = _keys(request, request.tenant)
        return self._by_tenant

    @property
    def hint(self) -> int | None:
        """What requests that belong together have in common: by their client's word, else their beginning."""
        if self._request.affinity is not None:
            return self._request.affinity
        keys = self.keys(shared=False)
        return keys[0] if keys else None


class SentPrefixes:
    """Keys of what was dispatched to one run lately; bounded."""

    def __init__(self) -> None:
        self._sketches = 0
        self._keys: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: list[int]) -> None:
        for key in keys:
            self._keys[key] = self._sketches
            self._keys.move_to_end(key)
        while len(self._keys) > _MAX_SENT:
            self._keys.popitem(last=False)

    def told(self) -> None:
        """The worker sent a new sketch: what is old enough it would be in."""
        self._sketches += 1
        oldest = self._sketches - _KEPT_SKETCHES
        while self._keys and next(iter(self._keys.values())) <= oldest:
            self._keys.popitem(last=False)


class HitMeter:
    """Predicted against real prefix hits, in tokens since the start, over requests that ended.

    `missed` were predicted and not found, `unforeseen` found and not predicted.
    """

    __slots__ = ("actual", "missed", "predicted", "unforeseen")

    def __init__(self) -> None:
        self.predicted = self.actual = self.missed = self.unforeseen = 0

    def note(self, predicted: int, actual: int) -> None:
        self.predicted += predicted
        self.actual += actual
        self.missed += max(0, predicted - actual)
        self.unforeseen += max(0, actual - predicted)


def cached_tokens(sketch: bytes, sent: SentPrefixes, prefix: PromptPrefix) -> int:
    """The prompt's first tokens that a worker with that sketch has, or will when what was sent is computed.

    0 for a sketch of another form than ours, and for a worker without a prefix cache, which has none.
    """
    if len(sketch) != SKETCH_BYTES:
        return 0
    found = 0
    for key, depth in zip(prefix.keys(is_shared(sketch)), DEPTHS, strict=False):
        if not (holds(sketch, key) or key in sent):
            break
        found = depth
    return found


def rendezvous(hint: int, slot: int) -> int:
    """The worker with the highest one is a hint's own; another's leaving or coming moves no other hint.

    Source: Thaler, Ravishankar: "Using name-based mappings to increase hit rates", IEEE/ACM ToN 6(1), 1998.
    """
    mixed = (hint ^ (slot + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def _keys(request: InferenceRequest, salt: str) -> list[int]:
    tokens = request.prompt_token_ids
    if request.output_token_ids:
        tokens = tokens[: DEPTHS[-1]] + request.output_token_ids
    try:
        return prefix_keys(tokens, salt)
    except ValueError:
        return []  # ids that no worker will take: it says which
