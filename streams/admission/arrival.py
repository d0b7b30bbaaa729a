"""What the policy sees of a request that comes, and what it decides by that alone.

So a decision can be made again from its record on fleet.decisions, by this policy or another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from schemas.priority import PriorityClass
from schemas.records import InferenceRequest
from streams.admission.refusal import RETRY_LATER_MS, Refusal
from streams.admission.shedding import ShedLevel, ShedPolicy

MAX_RETRY_AFTER_MS = 60_000
# What a budget refuses: before the load is asked, and whatever the policy.
BUDGET_EXCEEDED = "budget_exceeded"
# A tenant may have so many requests waiting whatever its share: two at once are no flood.
_FEW = 2
# Who is alone in the highest class takes nothing from others, however much waits: its deadlines bound that.
_ALONE = 0.95


@dataclass(frozen=True, slots=True)
class OverloadPolicy:
    """`start_ms`: by class, how long a request may wait for a worker where it does not say; 0 is for ever."""

    start_ms: tuple[int, ...] = (60_000, 120_000, 0)
    shed: ShedPolicy = field(default_factory=ShedPolicy)

    def refusal(self, request: InferenceRequest, seen: "Arrival") -> Refusal | None:
        """Why the load does not let the request in: decided by `seen` alone here."""
        return refusal(self, seen)

    def cap(self, request: InferenceRequest, seen: "Arrival") -> int | None:
        """What the request's `max_tokens` becomes, None where it stays."""
        return capped(self.shed, seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request and the state it met. Durations in ms; `start_ms` is 0 where the request does not say.

    `max_tokens` is what it asked for. Of its class: `queued_requests`, `queued_tokens`, and `class_wait_ms`,
    the longest wait there now. Of its tenant in that class: `tenant_requests`, `tenant_tokens`, and `share`,
    the part of what is served that it may count on. `ahead_tokens` are served before it. Its class's queue
    drains by `drain_tokens_per_s` (0: not known); waits have lately been `wait_correction` times what follows
    from these. So it is expected to wait `wait_ms` here, and `prefill_ms` at its worker for its first token.
    `budget_left`: what its tenant may still spend in its month (its sign is exact); None: no budget stops it.
    """

    priority: int
    attempt: int
    arrived_at: int
    elapsed_ms: int
    prompt_tokens: int
    max_tokens: int
    min_tokens: int
    expected_output_tokens: int
    start_ms: int
    queued_requests: int
    queued_tokens: int
    class_wait_ms: int
    tenant_requests: int
    tenant_tokens: int
    share: float
    wait_correction: float
    ahead_tokens: float
    drain_tokens_per_s: float
    wait_ms: float
    prefill_ms: float
    num_workers: int
    kv_use: float
    shed_level: int
    budget_left: float | None = None

    @property
    def is_out_of_budget(self) -> bool:
        return self.budget_left is not None and self.budget_left <= 0

    @property
    def predicted_ttft_ms(self) -> float:
        """From its arrival here to its first token."""
        return self.wait_ms + self.prefill_ms

    def inputs(self) -> dict[str, float]:
        """The figures by name, as a decision's record has them; none for what is None."""
        figures = {name: float(getattr(self, name)) for name in _KINDS}
        figures["predicted_ttft_ms"] = self.predicted_ttft_ms
        if self.budget_left is not None:
            figures[_BUDGET_LEFT] = self.budget_left
        return figures

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, float]) -> "Arrival":
        """What `inputs` was made from. Raises KeyError for a figure that is missing."""
        values: dict[str, Any] = {name: kind(inputs[name]) for name, kind in _KINDS.items()}
        return cls(**values, budget_left=inputs.get(_BUDGET_LEFT))


_BUDGET_LEFT = "budget_left"
_KINDS = {
    f.name: float if f.type in (float, "float") else int for f in fields(Arrival) if f.name != _BUDGET_LEFT
}


def refusal(policy: OverloadPolicy, seen: Arrival) -> Refusal | None:
    """Why the load does not let the request in, or None. A retry was let in before."""
    if seen.attempt > 1:
        return None
    return _over_share(policy.shed, seen) or _free_class(seen) or _too_late(policy, seen)


def capped(policy: ShedPolicy, seen: Arrival) -> int | None:
    """What `max_tokens` becomes, None where it stays."""
    if seen.shed_level < ShedLevel.CAP_FREE or seen.priority != PriorityClass.FREE or seen.attempt > 1:
        return None
    cap = max(policy.free_max_tokens, seen.min_tokens)
    return cap if cap < seen.max_tokens else None


def _over_share(policy: ShedPolicy, seen: Arrival) -> Refusal | None:
    bound_ms = policy.rise_wait_ms[ShedLevel.FAIR_SHARE - 1]
    if seen.shed_level < ShedLevel.FAIR_SHARE or seen.priority == PriorityClass.BATCH:
        return None
    # Another class's wait is no reason: this one may have its room.
    if seen.class_wait_ms < policy.fall * bound_ms or seen.tenant_requests < _FEW:
        return None
    if seen.share >= _ALONE and seen.priority == PriorityClass.INTERACTIVE:
        return None
    rate = seen.share * seen.drain_tokens_per_s
    own_ms = seen.tenant_tokens * 1_000 / rate if rate > 0 else 0.0
    if own_ms <= bound_ms:
        return None
    message = "there is more to do than the fleet can, and the tenant has more than its share waiting"
    return Refusal(429, "over_fair_share", message, retry_after(own_ms - bound_ms))


def _free_class(seen: Arrival) -> Refusal | None:
    if seen.shed_level < ShedLevel.REFUSE_FREE or seen.priority != PriorityClass.FREE:
        return None
    message = "there is more to do than the fleet can: class free is not served now"
    return Refusal(429, "free_class_shed", message, retry_after(seen.wait_ms))


def _too_late(policy: OverloadPolicy, seen: Arrival) -> Refusal | None:
    begins_ms = seen.elapsed_ms + seen.wait_ms
    if seen.start_ms:
        most_ms, what = seen.start_ms, "asks for its first token"
        begins_ms += seen.prefill_ms
    else:
        # The class's bound is on what others cause: a long prompt of its own is no reason to refuse it.
        most_ms, what = policy.start_ms[seen.priority], "may wait"
    # With nobody ahead, a later try is not served sooner: whoever is slow is so by the request itself.
    if not most_ms or begins_ms <= most_ms or not seen.ahead_tokens:
        return None
    message = f"the request {what} within {most_ms} ms, and is expected to begin after {begins_ms:.0f} ms"
    return Refusal(429, "start_unreachable", message, retry_after(begins_ms - most_ms))


def retry_after(wait_ms: float) -> int:
    """A wait as clients are told it (ms)."""
    return int(max(RETRY_LATER_MS, min(MAX_RETRY_AFTER_MS, wait_ms)))
