"""What is given up under overload, and in which order (architecture §6). Pure: time is an argument.

A model's level rises one step at a time while requests of the online classes wait too long or KV blocks run
out, and falls one step at a time once both are well below where it rose: a level that came and went with
every burst would refuse some of what there is room for, and tell clients nothing that they could act on.
Blocks that are all in use while nobody waits are a fleet well used, perhaps by batch: they hold back batch
and nothing else. Whatever their use, they refuse nobody.

The last level is there whoever waits: with no traffic of class free it finds nobody to refuse, and is told
all the same, for it says how long others wait.
"""

from dataclasses import dataclass
from enum import IntEnum

from schemas.priority import PriorityClass
from schemas.records import InferenceRequest


class ShedLevel(IntEnum):
    """Each level does what those below it do, too."""

    NONE = 0
    PAUSE_BATCH = 1  # batch waits
    CAP_FREE = 2  # answers of class free are cut short
    FAIR_SHARE = 3  # 429 for tenants that have more waiting than their share is served in time
    REFUSE_FREE = 4  # 429 for all of class free

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class ShedPolicy:
    """`rise_wait_ms` and `rise_kv_use`: what brings each level, from the first on. A level ends when the wait
    is below `fall` times what brings it and KV use `kv_margin` below, for `hold_ms`; between two steps up lie
    `step_ms`, in which the last one can show what it does.
    """

    rise_wait_ms: tuple[int, int, int, int] = (250, 1_000, 2_000, 5_000)
    rise_kv_use: tuple[float, float] = (0.90, 0.97)
    fall: float = 0.5
    kv_margin: float = 0.05
    hold_ms: int = 3_000
    step_ms: int = 300
    free_max_tokens: int = 512


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A model's level with the figures that brought it: the online classes' longest wait, KV use 0 … 1."""

    model: str
    before: ShedLevel
    level: ShedLevel
    wait_ms: int
    kv_use: float


class Ladder:
    """One model's level."""

    def __init__(self, policy: ShedPolicy) -> None:
        self._policy = policy
        self.level = ShedLevel.NONE
        self._rose_at: int | None = None
        self._calm_since: int | None = None

    def update(self, wait_ms: int, kv_use: float, now: int) -> bool:
        """Takes the longest wait of the online classes and KV use; whether the level changed."""
        policy = self._policy
        if self._wanted(wait_ms, kv_use) > self.level:
            self._calm_since = None
            if self._rose_at is not None and now - self._rose_at < policy.step_ms:
                return False
            self.level, self._rose_at = ShedLevel(self.level + 1), now
            return True
        if self.level is ShedLevel.NONE:
            return False
        if self._wanted(wait_ms / policy.fall, kv_use + policy.kv_margin) >= self.level:
            self._calm_since = None
            return False
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < policy.hold_ms:
            return False
        self.level, self._calm_since = ShedLevel(self.level - 1), now
        return True

    def _wanted(self, wait_ms: float, kv_use: float) -> int:
        policy = self._policy
        by_wait = sum(wait_ms >= bound for bound in policy.rise_wait_ms)
        by_kv = sum(kv_use >= bound for bound in policy.rise_kv_use)
        if wait_ms == 0:
            by_kv = min(by_kv, ShedLevel.PAUSE_BATCH)
        return max(by_wait, by_kv)


def paused(level: ShedLevel, request: InferenceRequest) -> bool:
    """Whether the request stays in its queue at this level. A retry has begun: it goes on."""
    batch = request.priority == PriorityClass.BATCH
    return batch and level >= ShedLevel.PAUSE_BATCH and request.attempt == 1
