"""What fleet.decisions and inference.usage say of each request."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from infra.replay.policy import Candidate
from schemas.records import Decision, Usage
from streams.admission.arrival import Arrival

_FIGURE = re.compile(r"slot_(\d+)_(load|cached_tokens|slowness|prefill_ms)")
# What a request came to. Others (requeue, cap, shed) are steps on its way, or no request's.
_ENDS = frozenset({"dispatch", "reject", "evict"})


@dataclass(slots=True)
class Recorded:
    """A first attempt: what was seen, what came of it. `usage` is None while, or if, it has none."""

    tenant: str
    model: str
    seen: Arrival
    action: str
    reason: str
    queued_ms: float = 0.0
    cached_tokens: float = 0.0
    max_tokens: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    usage: Usage | None = None

    @property
    def real_ttft_ms(self) -> float | None:
        """From its arrival to its first token."""
        if self.usage is None or self.usage.first_token_ms is None or self.usage.attempt > 1:
            return None
        return self.queued_ms + self.usage.first_token_ms


class Recording:
    """Fed with records in any order, it gives the requests in the order of their arrival."""

    def __init__(self) -> None:
        self._requests: dict[bytes, Recorded] = {}
        self._usages: dict[bytes, Usage] = {}
        # Refused for what no load policy decides: a tenant that is not there, a body that is not valid.
        self.num_unseen = 0

    def add(self, record: Decision | Usage) -> None:
        if isinstance(record, Usage):
            known = self._usages.get(record.request_id)
            if known is None or _rank(record) > _rank(known):
                self._usages[record.request_id] = record
        elif record.attempt == 1 and record.action in _ENDS:
            try:
                recorded = _recorded(record)
            except KeyError:
                self.num_unseen += 1
            else:
                self._requests[record.request_id] = recorded

    def __len__(self) -> int:
        return len(self._requests) + len(self._usages)

    def requests(self) -> Iterable[Recorded]:
        for request_id, recorded in sorted(
            self._requests.items(), key=lambda entry: entry[1].seen.arrived_at
        ):
            recorded.usage = self._usages.get(request_id)
            yield recorded


def _recorded(decision: Decision) -> Recorded:
    """Raises KeyError where the decision came before anything was seen of the load."""
    inputs = decision.inputs
    seen = Arrival.from_inputs(inputs)
    return Recorded(
        decision.tenant,
        decision.model,
        seen,
        decision.action,
        decision.reason,
        inputs.get("queued_ms", 0.0),
        inputs.get("cached_tokens", 0.0),
        int(inputs.get("granted_max_tokens", seen.max_tokens)),
        _candidates(inputs, decision.slot),
    )


def _candidates(inputs: dict[str, float], chosen: int | None) -> list[Candidate]:
    slots: dict[int, dict[str, float]] = {}
    for name, value in inputs.items():
        if (figure := _FIGURE.fullmatch(name)) is not None:
            slots.setdefault(int(figure[1]), {})[figure[2]] = value
    return [
        Candidate(
            slot,
            figures["load"],
            int(figures["cached_tokens"]),
            figures["slowness"],
            figures.get("prefill_ms"),
            slot == chosen,
        )
        for slot, figures in sorted(slots.items())
    ]


def _rank(usage: Usage) -> tuple[int, bool, int]:
    return usage.attempt, usage.sealed, usage.output_tokens
