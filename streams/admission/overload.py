"""The load of each model: how fast its queue drains, how soon a request would begin, the shedding level."""

from collections import Counter, deque
from dataclasses import dataclass, field

from schemas.priority import PriorityClass
from schemas.records import InferenceRequest, Usage
from streams.admission.arrival import Arrival, OverloadPolicy, retry_after
from streams.admission.backlog import Backlog
from streams.admission.drain_rate import DrainRate
from streams.admission.fair_queue import QueuedRequest
from streams.admission.memory import Known
from streams.admission.refusal import RETRY_LATER_MS, Refusal
from streams.admission.router import Router
from streams.admission.shedding import Ladder, LevelChange, ShedLevel
from streams.admission.worker import Worker

ONLINE = (PriorityClass.INTERACTIVE, PriorityClass.FREE)
# What nobody will wait for; a rate near zero would give no number at all.
_FOR_EVER_MS = 3_600_000.0
# The predictions' error is taken off by so much of each answer, and never trusted beyond this factor.
_CORRECTION_WEIGHT = 0.05
_MAX_CORRECTION = 16.0
_MAX_OUTCOMES = 10_000
_SHED_BY = {"over_fair_share": ShedLevel.FAIR_SHARE, "free_class_shed": ShedLevel.REFUSE_FREE}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's time to its first token (ms), from its arrival in admission: predicted then, and real."""

    priority: int
    predicted_ms: float
    real_ms: float


@dataclass(slots=True)
class _Load:
    """One model. `predicted_ms` and `real_ms` are running means of prefills at the workers."""

    ladder: Ladder
    drain: DrainRate = field(default_factory=DrainRate)
    tokens_per_s: float = 0.0
    kv_use: float = 0.0
    num_workers: int = 0
    predicted_ms: float = 0.0
    real_ms: float = 0.0
    served_tokens: int = 0
    worker_ms: int = 0

    @property
    def correction(self) -> float:
        if not self.predicted_ms:
            return 1.0
        return min(_MAX_CORRECTION, max(1 / _MAX_CORRECTION, self.real_ms / self.predicted_ms))


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
            load.worker_ms += load.num_workers * (0 if self._last is None else max(0, now - self._last))
            load.num_workers = len(workers)
            load.kv_use = self._router.kv_use(model)
            online = [self._backlog.queue(model).classes[c] for c in ONLINE]
            load.drain.tick(any(fair.num_requests for fair in online), load.num_workers, now)
            guess = sum(w.status.prefill_tokens_per_s + w.status.decode_tokens_per_s for w in workers)
            load.tokens_per_s = load.drain.tokens_per_s(load.num_workers, guess)
            before, wait_ms = load.ladder.level, max(fair.longest_wait_ms(now) for fair in online)
            if load.ladder.update(wait_ms, load.kv_use, now):
                changes.append(LevelChange(model, before, load.ladder.level, wait_ms, load.kv_use))
        self._last = now
        return changes

    def level(self, model: str) -> ShedLevel:
        load = self._loads.get(model)
        return ShedLevel.NONE if load is None else load.ladder.level

    def levels(self) -> dict[str, tuple[ShedLevel, float, float]]:
        """By model: its level, KV use (0 … 1), tokens its queue drains a second."""
        return {m: (load.ladder.level, load.kv_use, load.tokens_per_s) for m, load in self._loads.items()}

    def work(self) -> dict[str, tuple[int, int]]:
        """By model: tokens of requests that ended, and the time that its workers had for them (ms)."""
        return {m: (load.served_tokens, load.worker_ms) for m, load in self._loads.items()}

    def arrival(self, request: InferenceRequest, expected: int, weight: float, now: int) -> Arrival:
        """What the policy is to see of a request that comes now. O(workers of the model)."""
        load = self._loads.get(request.model) or _Load(Ladder(self.policy.shed))
        classes = self._backlog.queue(request.model).classes
        fair, priority = classes[request.priority], request.priority
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + expected
        ahead = fair.tokens_ahead(request.tenant, weight, tokens)
        ahead += sum(higher.num_tokens for higher in classes[:priority])
        rate = load.tokens_per_s
        workers = self._router.workers(request.model)
        prefills = [ms for w in workers if (ms := w.prefill_ms(tokens - expected)) is not None]
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
            share=fair.share(request.tenant, weight),
            ahead_tokens=ahead,
            drain_tokens_per_s=rate,
            wait_ms=min(_FOR_EVER_MS, ahead * 1_000 / rate) if rate > 0 else 0.0,
            prefill_ms=min(prefills, default=0.0) * load.correction,
            num_workers=len(workers),
            kv_use=load.kv_use,
            shed_level=load.ladder.level,
        )

    def dispatched(self, item: QueuedRequest, worker: Worker) -> float | None:
        """Left the queue for a worker that counts it now; how long its prefill is to take, uncorrected."""
        load = self._loads.get(item.request.model)
        if load is not None and item.request.priority in ONLINE:
            load.drain.served(item.tokens)
        return worker.prefill_ms()

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
            load.predicted_ms += _CORRECTION_WEIGHT * (known.prefill_ms - load.predicted_ms)
            load.real_ms += _CORRECTION_WEIGHT * (first_token_ms - load.real_ms)

    def retry_after_ms(self, model: str) -> int:
        """When what waits now is gone, by the rate at which the queue drains."""
        load = self._loads.get(model)
        tokens = sum(fair.num_tokens for fair in self._backlog.queue(model).classes)
        if load is None or not load.tokens_per_s:
            return RETRY_LATER_MS
        return retry_after(tokens * 1_000 / load.tokens_per_s)
