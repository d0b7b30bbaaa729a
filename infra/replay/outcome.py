"""What became of requests: as it was recorded, or under a policy that carried its own state forward."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from infra.replay.comparison import Side, by_tenant, percentiles, rate
from infra.replay.policy import Policy
from infra.replay.recording import Recorded, Recording
from schemas.priority import PriorityClass


def outcome(policy: Policy, requests: Iterable[Recorded]) -> dict[str, Any]:
    """Figures of what happened, with the policy's predictions beside. Hit rates are of what ended."""
    side, evicted = Side(), Counter[tuple[str, str]]()
    ttft_ms: defaultdict[str, list[float]] = defaultdict(list)
    hit_tokens = prompt_tokens = 0
    for request in requests:
        label = PriorityClass(request.seen.priority).label
        if request.action == "reject":
            side.refused[label, request.reason] += 1
            continue
        predicted = policy.predict_ttft_ms(request.tenant, request.model, request.seen)
        side.add(request, request.max_tokens, predicted)
        side.hit_tokens += request.cached_tokens
        evicted[label, request.reason] += request.action == "evict"
        if (real := request.real_ttft_ms) is not None:
            ttft_ms[label].append(real)
        if request.usage is not None:
            hit_tokens += request.usage.cached_tokens
            prompt_tokens += request.usage.input_tokens
    return {
        **side.figures(),
        "evicted": {f"{label} {code}": n for (label, code), n in sorted(evicted.items()) if n},
        "ttft_ms": {label: percentiles(values) for label, values in sorted(ttft_ms.items())},
        "hit_rate": rate(hit_tokens, prompt_tokens),
    }


def differences(before: Recording, after: Recording) -> dict[str, Any]:
    """Between two outcomes of the same requests: who is refused now, or let in now, by class and tenant."""
    newly_refused, newly_let_in = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    was_refused = {r.request_id: r.action == "reject" for r in before.requests()}
    for request in after.requests():
        whose = PriorityClass(request.seen.priority).label, request.tenant
        is_refused = request.action == "reject"
        if is_refused and not was_refused[request.request_id]:
            newly_refused[whose] += 1
        elif was_refused[request.request_id] and not is_refused:
            newly_let_in[whose] += 1
    return {"newly_refused": by_tenant(newly_refused), "newly_let_in": by_tenant(newly_let_in)}
