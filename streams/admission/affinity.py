"""Where a prompt's beginning is cached, by what workers say and by what was just sent there."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from schemas.prefix_sketch import DEPTHS, SKETCH_BYTES, is_shared, places, prefix_keys
from schemas.records import InferenceRequest, WorkerStatus

# A sketch comes once a second. What was sent waits in a queue at most that many of them, then is computed
# and told of, or was evicted again.
_KEPT_SKETCHES = 8
# As many keys as a sketch has: a hundred long prompts a second, or a thousand short ones.
_MAX_SENT = 4096
_MASK = (1 << 64) - 1
_DOUBLE_MASK = (1 << 53) - 1
_NAMES = tuple(f"prefix_{depth}" for depth in DEPTHS)
_SHARED_NAMES = tuple(f"shared_prefix_{depth}" for depth in DEPTHS)


# Depth in tokens, key, and the key's places in a sketch.
Probe = tuple[int, int, int, int, int, int, int, int, int, int]


class PromptPrefix:
    """A request's prefix keys (schemas/prefix_sketch.py), computed when they are first asked for."""

    __slots__ = ("_by_tenant", "_probes", "_request", "_shared")

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self._probes: tuple[list[Probe], list[Probe]] = ([], [])
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

    def seen(self) -> dict[str, float]:
        """The keys that were asked for, by depth, cut to what a double holds; for the decision's record."""
        found = {}
        for names, keys in ((_NAMES, self._by_tenant), (_SHARED_NAMES, self._shared)):
            for name, key in zip(names, keys or (), strict=False):
                found[name] = float(key & _DOUBLE_MASK)
        return found

    def probes(self, shared: bool, most: int = len(DEPTHS)) -> list[Probe]:
        """What to look for in a sketch: of the first `most` keys at least, as far as there are so many."""
        found = self._probes[shared]
        if len(found) < most:
            keys = self.keys(shared)
            for index in range(len(found), min(most, len(keys))):
                found.append((DEPTHS[index], keys[index], *places(keys[index])))
        return found

    @property
    def hint(self) -> int | None:
        """What requests that belong together have in common: by their client's word, else their beginning."""
        if self._request.affinity is not None:
            return self._request.affinity
        keys = self.keys(shared=False)
        return keys[0] if keys else None


class SentPrefixes:
    """`keys` of what was dispatched to one run lately, each with the sketch that it came after; bounded."""

    def __init__(self) -> None:
        self._sketches = 0
        self.keys: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self.keys

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: list[int]) -> None:
        for key in keys:
            self.keys[key] = self._sketches
            self.keys.move_to_end(key)
        while len(self.keys) > _MAX_SENT:
            self.keys.popitem(last=False)

    def told(self) -> None:
        """The worker sent a new sketch: what is old enough it would be in."""
        self._sketches += 1
        oldest = self._sketches - _KEPT_SKETCHES
        while self.keys and next(iter(self.keys.values())) <= oldest:
            self.keys.popitem(last=False)


class CachingWorker(Protocol):
    """What says of a worker which prefixes it has."""

    status: WorkerStatus
    sent: SentPrefixes


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
    sent_keys = sent.keys
    for depth, key, byte0, bit0, byte1, bit1, byte2, bit2, byte3, bit3 in prefix.probes(is_shared(sketch)):
        if not (
            sketch[byte0] & bit0 and sketch[byte1] & bit1 and sketch[byte2] & bit2 and sketch[byte3] & bit3
        ) and (key not in sent_keys):
            break
        found = depth
    return found


def cached_tokens_at(workers: Sequence[CachingWorker], prefix: PromptPrefix) -> list[int]:
    """`cached_tokens` of each. Most have nothing of a prompt: these are told by its shallowest key alone."""
    found = [0] * len(workers)
    kind = -1
    for index, worker in enumerate(workers):
        sketch = worker.status.prefix_sketch
        if len(sketch) != SKETCH_BYTES:
            continue
        if sketch[0] != kind:
            kind, probes = sketch[0], prefix.probes(is_shared(sketch), 1)
            if not probes:
                return found
            _, key, byte0, bit0, byte1, bit1, byte2, bit2, byte3, bit3 = probes[0]
        if (
            sketch[byte0] & bit0 and sketch[byte1] & bit1 and sketch[byte2] & bit2 and sketch[byte3] & bit3
        ) or key in worker.sent.keys:
            found[index] = cached_tokens(sketch, worker.sent, prefix)
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
