"""Recorded traffic once more, on a fleet like the one that served it, with a policy that meets what it made.

The simulator runs admission's code with the policy in it. Requests come when they came, as long as they were,
with the output that they had (of those that came to none, what admission expected of them) and the
beginnings that they shared. Workers are those that served: their KV blocks and places, and the step times and
prefill rates that they told. All of them are there all the time, nobody cancels, and no step time depends on
the length of contexts. So a policy is to be held against the shipped one on the same fleet, and that one
against the record, which says how much the fleet is worth.

What a limit refused, a budget, a bound of the queue or the request itself stays refused, and tenants have the
weights that they have now.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression

from infra.replay.comparison import LOAD_REFUSALS
from infra.replay.policy import Candidate, Policy, ShippedPolicy
from infra.replay.recording import Recorded, RecordedWorker, Recording
from infra.simulator.admission_driver import AdmissionDriver
from infra.simulator.scenario import Measured, Model, Scenario, TenantPlan, Workers
from infra.simulator.simulation import Simulation
from infra.simulator.workload import FIRST_PREFIX_ID, Arrival
from schemas.priority import PriorityClass
from schemas.records import InferenceRequest
from streams.admission.affinity import PromptPrefix
from streams.admission.arrival import Arrival as Seen
from streams.admission.arrival import OverloadPolicy
from streams.admission.refusal import Refusal
from streams.admission.router import RoutingPolicy
from streams.admission.worker import Worker
from workers.config import WorkerConfig

_MIN_STEP_MS = 0.001


@dataclass(slots=True)
class RecordedArrival(Arrival):
    """`shared`: up to which depth (tokens) its prompt begins like others', and an id of that beginning."""

    shared: Sequence[tuple[int, int]] = ()

    def prompt_token_ids(self, number: int) -> list[int]:
        ids: list[int] = []
        for depth, beginning in self.shared:
            ids += [FIRST_PREFIX_ID + beginning] * (depth - len(ids))
        own = Arrival.prompt_token_ids(self, number)
        return ids + own[len(ids) :]


class ClosedLoop:
    """Raises ValueError where nothing was dispatched, so that nobody knows the fleet."""

    def __init__(self, requests: Iterable[Recorded], weights: Mapping[str, float]) -> None:
        """`requests` by their arrival; `weights` of tenants, 1 where none is named."""
        asked = [r for r in requests if r.action != "reject" or r.reason in LOAD_REFUSALS]
        fleet = _fleet(asked)
        if not fleet:
            raise ValueError("no request was dispatched in that time: the fleet is not known")
        models = {workers.model for workers in fleet}
        self.requests = [request for request in asked if request.model in models]
        self.arrivals = _arrivals(self.requests)
        self.scenario = Scenario(
            duration=self.arrivals[-1].at + 1.0,
            models={w.model: Model(max_model_len=_longest(self.requests)) for w in fleet},
            fleet=fleet,
            tenants={r.tenant: TenantPlan(weights.get(r.tenant, 1.0)) for r in self.requests},
        )

    def run(self, policy: Policy) -> Recording:
        """What `policy` makes of it, as it would lie on the log. Request k is `k.to_bytes(16, "little")`.

        Raises ValueError for a policy that routes to what is no candidate.
        """
        if type(policy) is ShippedPolicy:
            overload, routing = policy.overload, policy.routing
        else:
            settings = getattr(policy, "overload", OverloadPolicy())
            overload = _Overload(settings.start_ms, settings.shed, policy)
            routing = _Routing(policy=policy, seen=overload.seen)
        admission = AdmissionDriver(self.scenario, log_decisions=True, overload=overload, routing=routing)
        simulation = Simulation(self.scenario, Path(), record=True, asked=self.arrivals, admission=admission)
        found = Recording()
        for record in simulation.run().record or ():
            found.add(record)
        return found


@dataclass(frozen=True, slots=True)
class _Overload(OverloadPolicy):
    """`seen` is kept of what may be routed."""

    policy: Policy = field(default_factory=ShippedPolicy)
    seen: dict[bytes, Seen] = field(default_factory=dict)

    def refusal(self, request: InferenceRequest, seen: Seen) -> Refusal | None:
        if request.attempt > 1:
            return None
        refused = self.policy.admit(request.tenant, request.model, seen)
        if refused is None:
            self.seen[request.request_id] = seen
        return refused

    def cap(self, request: InferenceRequest, seen: Seen) -> int | None:
        most = self.policy.max_tokens(request.tenant, request.model, seen)
        return most if most < seen.max_tokens else None


@dataclass(frozen=True, slots=True)
class _Routing(RoutingPolicy):
    policy: Policy = field(default_factory=ShippedPolicy)
    seen: Mapping[bytes, Seen] = field(default_factory=dict)

    def pick(
        self, request: InferenceRequest, rated: Iterator[tuple[float, Worker]], prefix: PromptPrefix | None
    ) -> Worker:
        seen = self.seen.get(request.request_id)
        if seen is None:
            return RoutingPolicy.pick(self, request, rated, prefix)
        workers = [worker for _, worker in rated]
        if len(workers) == 1:
            return workers[0]
        candidates = []
        for worker in workers:
            cached = 0 if prefix is None else worker.cached_tokens(prefix)
            prefill_ms = worker.prefill_ms(request.priority, seen.prompt_tokens - cached)
            slowness = worker.prefill_slowness
            candidates.append(Candidate(worker.slot, worker.load, cached, slowness, prefill_ms, False))
        slot = self.policy.route(seen, candidates)
        for worker in workers:
            if worker.slot == slot:
                return worker
        slots = [worker.slot for worker in workers]
        raise ValueError(f"the policy routed to slot {slot}; the candidates were {slots}")


def _fleet(requests: Iterable[Recorded]) -> list[Workers]:
    """The workers that something was dispatched to, by slot; as they were last, with step times of all."""
    by_slot: defaultdict[int, list[Recorded]] = defaultdict(list)
    is_shared = False
    for request in requests:
        if request.worker is not None:
            by_slot[request.worker.slot].append(request)
        is_shared |= any(name.startswith("shared_") for name, _, _ in request.prefix)
    return [_workers(some, "shared" if is_shared else "tenant") for _, some in sorted(by_slot.items())]


def _workers(requests: list[Recorded], prefix_caching: str) -> Workers:
    found = [(r.worker.num_seqs, _decode_ms(r.worker)) for r in requests if r.worker is not None]
    last = requests[-1].worker
    assert last is not None
    step_ms, seq_ms = _line([(seqs, ms) for seqs, ms in found if ms > 0])
    rates = [r.worker.prefill_tokens_per_s for r in requests if r.worker is not None]
    measured = Measured(
        last.num_blocks, step_ms, seq_ms, fmean([rate for rate in rates if rate > 0] or [0.0])
    )
    return Workers(
        requests[-1].model,
        measured=measured,
        max_num_seqs=last.max_num_seqs,
        max_num_batched_tokens=WorkerConfig.max_num_batched_tokens + last.max_num_seqs,
        prefix_caching=prefix_caching,
        swap_memory_mib=0,
    )


def _decode_ms(worker: RecordedWorker) -> float:
    """A step without prompt chunks, by how fast those were; else its steps of all kinds."""
    rate = worker.decode_tokens_per_s
    return 1000 * worker.num_seqs / rate if rate > 0 else worker.step_time_ms


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Step times by the number of sequences: the time of none, and what each adds, neither below 0."""
    if not points:
        return _MIN_STEP_MS, 0.0
    mean = fmean(ms for _, ms in points)
    if len({seqs for seqs, _ in points}) < 2:
        return mean, 0.0
    slope, intercept = linear_regression(*zip(*points, strict=True))
    if slope <= 0:
        return mean, 0.0
    if intercept < 0:
        return _MIN_STEP_MS, mean / fmean(seqs for seqs, _ in points)
    return max(_MIN_STEP_MS, intercept), slope


def _arrivals(requests: list[Recorded]) -> list[RecordedArrival]:
    times_seen = Counter(key for request in requests for key in request.prefix)
    ids: dict[tuple[str, int, int], int] = {}
    began_at = requests[0].seen.arrived_at
    found = []
    for request in requests:
        shared = []
        for key in request.prefix:
            if times_seen[key] < 2:
                break
            shared.append((key[1], ids.setdefault(key, len(ids))))
        seen = request.seen
        found.append(
            RecordedArrival(
                (seen.arrived_at - began_at) / 1000,
                "recorded",
                request.tenant,
                request.model,
                PriorityClass(seen.priority),
                seen.prompt_tokens,
                _num_output_tokens(request),
                seen.max_tokens,
                seen.start_ms or None,
                shared=shared,
            )
        )
    return found


def _num_output_tokens(request: Recorded) -> int:
    """When its answer ends: where that was cut short, or there is none, at what was to be expected."""
    expected = max(1, min(request.seen.expected_output_tokens, request.seen.max_tokens))
    if request.usage is None or not request.usage.output_tokens:
        return expected
    real = request.usage.output_tokens
    was_cut = request.max_tokens < request.seen.max_tokens and real >= request.max_tokens
    return max(real, expected) if was_cut else real


def _longest(requests: Iterable[Recorded]) -> int:
    return max(request.seen.prompt_tokens + request.seen.max_tokens for request in requests)
