"""A policy's decisions beside those that were made. Pure.

One step each: the policy meets every request with the load as it was, which its own decisions before would
have changed. So the figures say where it decides otherwise, and not what would have become of the fleet: that
is what closed_loop.py is for.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.replay.policy import HopChooser, Policy
from infra.replay.recording import Recorded
from schemas.priority import PriorityClass
from streams.admission.arrival import BUDGET_EXCEEDED

# Refusals that a policy decides; those under a limit or a bound of the queue stay as they are.
LOAD_REFUSALS = frozenset({"start_unreachable", "over_fair_share", "free_class_shed"})


@dataclass(slots=True)
class Side:
    """One policy's figures: as recorded, or as replayed."""

    let_in: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # (class, code)
    capped: int = 0
    predicted_ttft_ms: list[float] = field(default_factory=list)
    ttft_error_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    hit_tokens: float = 0.0

    def add(self, request: Recorded, max_tokens: int, predicted_ms: float) -> None:
        """One that is let in."""
        self.let_in += 1
        self.capped += max_tokens < request.seen.max_tokens
        self.prompt_tokens += request.seen.prompt_tokens
        self.predicted_ttft_ms.append(predicted_ms)
        if (real := request.real_ttft_ms) is not None:
            self.ttft_error_ms.append(predicted_ms - real)

    def figures(self) -> dict[str, Any]:
        return {
            "let_in": self.let_in,
            "refused": {f"{label} {code}": n for (label, code), n in sorted(self.refused.items())},
            "capped": self.capped,
            "predicted_ttft_ms": percentiles(self.predicted_ttft_ms),
            "ttft_error_ms": percentiles(self.ttft_error_ms),
            "predicted_hit_rate": rate(self.hit_tokens, self.prompt_tokens),
        }


@dataclass(slots=True)
class Comparison:
    """`newly_refused` and `newly_let_in` count requests by (class, tenant). For `hop_choices` of them there
    were a prefill and a decode slot; `hopped` were handed over, `hops_otherwise` would be and were not, or
    were and would not."""

    num_requests: int = 0
    evicted: int = 0
    recorded: Side = field(default_factory=Side)
    replayed: Side = field(default_factory=Side)
    newly_refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    newly_let_in: Counter[tuple[str, str]] = field(default_factory=Counter)
    routed_elsewhere: int = 0
    hop_choices: int = 0
    hopped: int = 0
    hops_otherwise: int = 0
    real_ttft_ms: list[float] = field(default_factory=list)
    real_hit_tokens: int = 0
    real_prompt_tokens: int = 0

    def figures(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "requests": self.num_requests,
            "evicted": self.evicted,
            "recorded": self.recorded.figures(),
            "replayed": self.replayed.figures(),
            "newly_refused": by_tenant(self.newly_refused),
            "newly_let_in": by_tenant(self.newly_let_in),
            "routed_elsewhere": self.routed_elsewhere,
            "handoffs": {
                "choices": self.hop_choices,
                "recorded": self.hopped,
                "otherwise": self.hops_otherwise,
            },
            "real_ttft_ms": percentiles(self.real_ttft_ms),
            "real_hit_rate": rate(self.real_hit_tokens, self.real_prompt_tokens),
        }


def compare(policy: Policy, requests: Iterable[Recorded]) -> Comparison:
    """Raises ValueError for a policy that routes to what is no candidate."""
    found = Comparison()
    for request in requests:
        _compare_one(policy, request, found)
    return found


def _compare_one(policy: Policy, request: Recorded, found: Comparison) -> None:
    seen, label = request.seen, PriorityClass(request.seen.priority).label
    whose = (label, request.tenant)
    found.num_requests += 1
    found.evicted += request.action == "evict"
    was_refused = request.action == "reject"
    by_load = was_refused and request.reason in LOAD_REFUSALS
    if was_refused:
        found.recorded.refused[label, request.reason] += 1
    else:
        found.recorded.add(request, request.max_tokens, seen.predicted_ttft_ms)
        found.recorded.hit_tokens += request.cached_tokens
    refused = _refused(policy, request)
    if refused is not None:
        found.replayed.refused[label, refused] += 1
        found.newly_refused[whose] += not was_refused
    elif was_refused and not by_load:
        found.replayed.refused[label, request.reason] += 1
    else:
        predicted = policy.predict_ttft_ms(request.tenant, request.model, seen)
        most = policy.max_tokens(request.tenant, request.model, seen)
        found.replayed.add(request, most, predicted)
        found.replayed.hit_tokens += _routed(policy, request, found)
        found.newly_let_in[whose] += was_refused
    if request.usage is not None and not was_refused:
        found.real_hit_tokens += request.usage.cached_tokens
        found.real_prompt_tokens += request.usage.input_tokens
    if (real := request.real_ttft_ms) is not None:
        found.real_ttft_ms.append(real)


def _refused(policy: Policy, request: Recorded) -> str | None:
    """A budget decides before any policy, by what was left of it."""
    if request.seen.is_out_of_budget:
        return BUDGET_EXCEEDED
    refusal = policy.admit(request.tenant, request.model, request.seen)
    return None if refusal is None else refusal.code


def _routed(policy: Policy, request: Recorded, found: Comparison) -> float:
    """The hit tokens that the policy's choice of a worker expects."""
    if request.hop is not None and isinstance(policy, HopChooser):
        found.hop_choices += 1
        found.hopped += request.hopped
        found.hops_otherwise += policy.hops(request.hop) is not request.hopped
    if not request.candidates:
        return request.cached_tokens
    slot = policy.route(request.seen, request.candidates)
    chosen = next((c for c in request.candidates if c.slot == slot), None)
    if chosen is None:
        slots = [c.slot for c in request.candidates]
        raise ValueError(f"the policy routed to slot {slot}; the candidates were {slots}")
    found.routed_elsewhere += not chosen.chosen
    return request.cached_tokens if chosen.chosen else float(chosen.cached_tokens)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 1) for p in (50, 90, 99)}


def rate(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def by_tenant(counts: Counter[tuple[str, str]], most: int = 10) -> dict[str, int]:
    named = {f"{label} {tenant}": n for (label, tenant), n in counts.most_common(most) if n}
    rest = sum(counts.values()) - sum(named.values())
    return named | ({"others": rest} if rest else {})
