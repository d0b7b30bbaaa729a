"""What fleet.decisions and inference.usage say of each request."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from infra.replay.policy import Candidate
from schemas.records import Decision, Usage
from streams.admission.arrival import Arrival
from streams.admission.hop import Hop

_FIGURE = re.compile(r"slot_(\d+)_(load|cached_tokens|slowness|prefill_ms)")
_PREFIX = re.compile(r"((?:shared_)?prefix)_(\d+)")
# What a request came to. Others (requeue, cap, shed) are steps on its way, or no request's.
_ENDS = frozenset({"dispatch", "reject", "evict"})


@dataclass(frozen=True, slots=True)
class RecordedWorker:
    """Whom a request was dispatched to, as it told of itself; `num_seqs` with the request."""

    slot: int
    num_blocks: int
    max_num_seqs: int
    num_seqs: float
    step_time_ms: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


@dataclass(slots=True)
class Recorded:
    """A first attempt: what was seen, what came of it. `usage` is None while, or if, it has none.

    `prefix`: (name, depth in tokens, key) of the prompt's beginnings, shortest first, as far as they were
    looked at; the same key is the same beginning. `hop` is what decided whether its prompt was computed
    elsewhere than the rest (`hopped`), None where there was no such choice.
    """

    request_id: bytes
    tenant: str
    model: str
    seen: Arrival
    action: str
    reason: str
    queued_ms: float = 0.0
    cached_tokens: float = 0.0
    max_tokens: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    prefix: list[tuple[str, int, int]] = field(default_factory=list)
    worker: RecordedWorker | None = None
    usage: Usage | None = None
    hop: Hop | None = None
    hopped: bool = False

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
        decision.request_id,
        decision.tenant,
        decision.model,
        seen,
        decision.action,
        decision.reason,
        inputs.get("queued_ms", 0.0),
        inputs.get("cached_tokens", 0.0),
        int(inputs.get("granted_max_tokens", seen.max_tokens)),
        _candidates(inputs, decision.slot),
        _prefix(inputs),
        _worker(inputs, decision.slot),
        hop=Hop.from_inputs(inputs),
        hopped=bool(inputs.get("hop_taken")),
    )


def _worker(inputs: dict[str, float], slot: int | None) -> RecordedWorker | None:
    if slot is None or "worker_step_time_ms" not in inputs:
        return None
    return RecordedWorker(
        slot,
        int(inputs["worker_num_blocks"]),
        int(inputs["worker_max_num_seqs"]),
        inputs["worker_num_seqs"],
        inputs["worker_step_time_ms"],
        inputs.get("worker_decode_tokens_per_s", 0.0),
        inputs["worker_prefill_tokens_per_s"],
    )


def _prefix(inputs: dict[str, float]) -> list[tuple[str, int, int]]:
    found = [(m[1], int(m[2]), int(key)) for name, key in inputs.items() if (m := _PREFIX.fullmatch(name))]
    return sorted(found)


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
