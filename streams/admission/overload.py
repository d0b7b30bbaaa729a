"""The load of each model: how fast its queue drains, how soon a request would begin, the shedding level."""

from collections import Counter, deque
from dataclasses import dataclass, field
from decimal import Decimal

from schemas.priority import PriorityClass
from schemas.records import InferenceRequest, Usage
from streams.admission.arrival import Arrival, OverloadPolicy, retry_after
from streams.admission.backlog import Backlog
from streams.admission.drain_rate import DrainRate
from streams.admission.fair_queue import FairQueue, QueuedRequest
from streams.admission.hop import handoff_ms
from streams.admission.memory import Known
from streams.admission.pairing import Route
from streams.admission.refusal import RETRY_LATER_MS, Refusal
from streams.admission.router import Router
from streams.admission.shedding import Ladder, LevelChange, ShedLevel

ONLINE = (PriorityClass.INTERACTIVE, PriorityClass.FREE)
# What nobody will wait for; a rate near zero would give no number at all.
_FOR_EVER_MS = 3_600_000.0
# How far predictions are corrected at most. A prefill rate that was measured on short prompts says little of
# long ones; a wait is off by those who come later and are served before, which is a matter of a few times.
_MAX_PREFILL_CORRECTION = 16.0
_MAX_WAIT_CORRECTION = 4.0
_CORRECTION_WEIGHT = 0.05
# Each 100 ms; half of it is gone after 5 s. Tenants within their share wait for moments only, and count.
_DEMAND_KEPT = 0.5 ** (1 / 50)
# Shorter waits are a matter of chance.
_MIN_CORRECTED_MS = 20.0
_MAX_OUTCOMES = 10_000
_SHED_BY = {"over_fair_share": ShedLevel.FAIR_SHARE, "free_class_shed": ShedLevel.REFUSE_FREE}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's time to its first token (ms), from its arrival in admission: predicted then, and real."""

    priority: int
    predicted_ms: float
    real_ms: float


@dataclass(slots=True)
class _Correction:
    """What predictions have to be multiplied with, from running means of theirs and the real figures."""

    most: float
    predicted: float = 0.0
    real: float = 0.0

    def note(self, predicted: float, real: float) -> None:
        self.predicted += _CORRECTION_WEIGHT * (predicted - self.predicted)
        self.real += _CORRECTION_WEIGHT * (real - self.real)

    @property
    def factor(self) -> float:
        if not self.predicted:
            return 1.0
        return min(self.most, max(1 / self.most, self.real / self.predicted))


@dataclass(slots=True)
class _Queue:
    """One model and class. `tokens_per_s` is how fast it drains while something waits in it. `demand` is the
    weight of all tenants that lately waited at the same time, less and less with time."""

    drain: DrainRate = field(default_factory=DrainRate)
    tokens_per_s: float = 0.0
    wait: _Correction = field(default_factory=lambda: _Correction(_MAX_WAIT_CORRECTION))
    demand: float = 0.0

    def share(self, fair: FairQueue, tenant: str, weight: float, *, asks: bool) -> float:
        """Of what is served, the part for a tenant while all whom it met lately wait: 1 if it is alone. Who
        does not ask for it takes none from others."""
        demand = max(self.demand, weight / fair.share(tenant, weight))
        if asks:
            self.demand = demand
        return weight / demand

    def drain_ms(self, tokens: float) -> float:
        """How long so many tokens take to leave it; 0 where that is not known."""
        return min(_FOR_EVER_MS, tokens * 1_000 / self.tokens_per_s) if self.tokens_per_s > 0 else 0.0


@dataclass(slots=True)
class _Load:
    """One model."""

    ladder: Ladder
    queues: tuple[_Queue, ...] = field(default_factory=lambda: tuple(_Queue() for _ in PriorityClass))
    prefill: _Correction = field(default_factory=lambda: _Correction(_MAX_PREFILL_CORRECTION))
    kv_use: float = 0.0
    num_workers: int = 0
    num_gpus: int = 0
    served_tokens: int = 0
    gpu_ms: int = 0


class Overload:
    """Knows the models that workers serve. `shed` counts, by level, what it cost requests since the start:
    answers cut short at CAP_FREE, refusals above. `outcomes` is to be drained; the oldest are lost.
    """

    def __init__(self, policy: OverloadPolicy, backlog: Backlog, router: Router) -> None:
        self.policy = policy
        self.shed: Counter[ShedLevel] = Counter()
        self.outcomes: deque[Outcome] = deque(maxlen=_MAX_OUTCOMES)
        self._backlog = backlog
        self._router = router
        self._loads: dict[str, _Load] = {}
        self._last: int | None = None

    def update(self, now: int) -> list[LevelChange]:
        """Measures, and moves the levels. Call about every 100 ms."""
        models = self._router.models()
        self._loads = {m: self._loads.get(m) or _Load(Ladder(self.policy.shed)) for m in models}
        changes = []
        for model, load in self._loads.items():
            workers = self._router.workers(model)
            load.gpu_ms += load.num_gpus * (0 if self._last is None else max(0, now - self._last))
            load.num_workers, load.num_gpus = len(workers), sum(w.status.num_gpus for w in workers)
            load.kv_use = self._router.kv_use(model)
            guess = self._router.tokens_per_s(model)
            classes = self._backlog.queue(model).classes
            for queue, fair in zip(load.queues, classes, strict=True):
                queue.demand *= _DEMAND_KEPT
                queue.drain.tick(fair.num_requests > 0, load.num_workers, now)
                queue.tokens_per_s = queue.drain.tokens_per_s(load.num_workers, guess)
            before, wait_ms = load.ladder.level, max(classes[c].longest_wait_ms(now) for c in ONLINE)
            if load.ladder.update(wait_ms, load.kv_use, now):
                changes.append(LevelChange(model, before, load.ladder.level, wait_ms, load.kv_use))
        self._last = now
        return changes

    def level(self, model: str) -> ShedLevel:
        load = self._loads.get(model)
        return ShedLevel.NONE if load is None else load.ladder.level

    def levels(self) -> dict[str, tuple[ShedLevel, float]]:
        """By model: its level, KV use (0 … 1)."""
        return {m: (load.ladder.level, load.kv_use) for m, load in self._loads.items()}

    def drain_rates(self) -> dict[str, list[float]]:
        """By model and class: tokens that its queue drains a second."""
        return {m: [queue.tokens_per_s for queue in load.queues] for m, load in self._loads.items()}

    def work(self) -> dict[str, tuple[int, int]]:
        """By model: tokens of requests that ended, and the time that its GPUs had for them (ms)."""
        return {m: (load.served_tokens, load.gpu_ms) for m, load in self._loads.items()}

    def arrival(
        self, request: InferenceRequest, expected: int, weight: float, now: int, left: Decimal | None = None
    ) -> Arrival:
        """What the policy is to see of a request that comes now. `left` of its tenant's budget. O(workers of
        the model)."""
        budget_left = None if left is None else float(left)
        load = self._loads.get(request.model) or _Load(Ladder(self.policy.shed))
        classes = self._backlog.queue(request.model).classes
        fair, priority = classes[request.priority], request.priority
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + expected
        queue = load.queues[priority]
        ahead = fair.tokens_ahead(request.tenant, weight, tokens)
        workers = self._router.workers(request.model)
        if not ahead and workers and not self._router.has_room(request, expected):
            ahead = float(tokens)  # it waits until that much room is made
        wait_ms = queue.drain_ms(ahead) * queue.wait.factor
        for i, higher in enumerate(classes[:priority]):
            ahead += higher.num_tokens
            wait_ms += load.queues[i].drain_ms(higher.num_tokens)
        return Arrival(
            priority=priority,
            attempt=request.attempt,
            arrived_at=now,
            elapsed_ms=max(0, now - request.accepted_at),
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            min_tokens=request.sampling.min_tokens,
            expected_output_tokens=expected,
            start_ms=request.start_ms or 0,
            queued_requests=fair.num_requests,
            queued_tokens=fair.num_tokens,
            class_wait_ms=fair.longest_wait_ms(now),
            tenant_requests=fair.tenant_requests(request.tenant),
            tenant_tokens=fair.tenant_tokens(request.tenant),
            share=queue.share(fair, request.tenant, weight, asks=budget_left is None or budget_left > 0),
            wait_correction=queue.wait.factor,
            ahead_tokens=ahead,
            drain_tokens_per_s=queue.tokens_per_s,
            wait_ms=min(_FOR_EVER_MS, wait_ms),
            prefill_ms=(self._router.prefill_ms(request) or 0.0) * load.prefill.factor,
            num_workers=len(workers),
            kv_use=load.kv_use,
            shed_level=load.ladder.level,
            budget_left=budget_left,
        )

    def dispatched(self, item: QueuedRequest, route: Route, queued_ms: int) -> float | None:
        """Left the queue for a worker that counts it now; how long its first token takes, uncorrected."""
        load = self._loads.get(item.request.model)
        if load is not None:
            load.queues[item.request.priority].drain.served(item.tokens)
            self.waited(item, queued_ms)
        computed_ms = route.worker.prefill_ms(item.request.priority)
        if computed_ms is None or route.decode is None or route.seen is None:
            return computed_ms
        return computed_ms + handoff_ms(self._router.policy.hop, route.seen)

    def waited(self, item: QueuedRequest, queued_ms: int) -> None:
        """It waited so long until it was dispatched, or given up."""
        load, seen = self._loads.get(item.request.model), item.arrival
        if load is None or seen is None or item.request.attempt > 1:
            return
        predicted_ms = seen.wait_ms / seen.wait_correction
        if max(predicted_ms, queued_ms) >= _MIN_CORRECTED_MS:
            load.queues[item.request.priority].wait.note(predicted_ms, queued_ms)

    def refused(self, refusal: Refusal) -> None:
        """A request was not let in."""
        if (level := _SHED_BY.get(refusal.code)) is not None:
            self.shed[level] += 1

    def ended(self, usage: Usage, known: Known | None) -> None:
        """A request that was dispatched here has ended; `known` is what is remembered of it."""
        load = self._loads.get(usage.model)
        if load is not None:
            load.served_tokens += usage.input_tokens + usage.output_tokens
        first_token_ms = usage.first_token_ms
        if first_token_ms is None or known is None or known.attempt > 1 or known.predicted_ms is None:
            return
        real_ms = float(known.queued_ms + first_token_ms)
        self.outcomes.append(Outcome(usage.priority, known.predicted_ms, real_ms))
        if load is not None and known.prefill_ms is not None:
            load.prefill.note(known.prefill_ms, first_token_ms)

    def retry_after_ms(self, model: str) -> int:
        """When what waits now is gone, by the rate at which the queue drains."""
        load = self._loads.get(model)
        if load is None:
            return RETRY_LATER_MS
        classes = self._backlog.queue(model).classes
        waits = (queue.drain_ms(fair.num_tokens) for queue, fair in zip(load.queues, classes, strict=True))
        return retry_after(sum(waits))
