"""Which model serves a request: the one that it names, or under overload one of that model's fallbacks.

A fallback has the same tokenizer and template (the catalogue sees to that), so the prompt's ids are right
for it. It is chosen when a request comes, and only if a worker of it has room at once: no queue is left for
another. What has produced tokens stays with the model that did: a retry never falls back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from schemas.records import InferenceRequest, Model
from streams.admission.backlog import Backlog
from streams.admission.decisions import DecisionLog
from streams.admission.overload import Overload
from streams.admission.prediction import OutputPredictor
from streams.admission.router import Blocked, Router
from streams.admission.tenants import Tenants

DEFAULT_WAIT_MS = 2_000


@dataclass(frozen=True, slots=True)
class FallbackPolicy:
    """`models`: by model, which serve for it, in order. `wait_ms`: with a longer wait to be expected one is
    looked for; with no worker at all, at once."""

    models: Mapping[str, Sequence[str]] = field(default_factory=dict)
    wait_ms: int = DEFAULT_WAIT_MS


@dataclass(slots=True)
class Fallback:
    """`num_requests` counts those that went to another model than they named. What `put` tells of a model
    comes before the policy."""

    policy: FallbackPolicy
    decisions: DecisionLog
    tenants: Tenants
    router: Router
    backlog: Backlog
    overload: Overload
    predictor: OutputPredictor
    num_requests: int = 0
    _told: dict[str, Sequence[str]] = field(default_factory=dict)

    def put(self, name: str, model: Model | None) -> None:
        """Takes the newest record of control.models; with None what the policy says counts again."""
        if model is None:
            self._told.pop(name, None)
        else:
            self._told[name] = model.fallback_models

    def redirect(self, request: InferenceRequest, now: int) -> InferenceRequest:
        """The request, or one like it for a fallback model that serves it now."""
        models = self._told.get(request.model, self.policy.models.get(request.model, ()))
        if not models or request.attempt > 1 or not request.allow_fallback:
            return request
        if self.tenants.refusal(request) is not None:
            return request  # it is refused by what it named
        has_worker = bool(self.router.workers(request.model))
        if has_worker and (self._goes_at_once(request) or self._wait_ms(request, now) <= self.policy.wait_ms):
            return request
        for model in models:
            other = replace(request, model=model)
            if self.tenants.refusal(other) is None and self._goes_at_once(other):
                self.num_requests += 1
                wait_ms = self._wait_ms(request, now)
                self.decisions.fell_back(request, "overload" if has_worker else "no_worker", wait_ms)
                return other
        return request

    def _goes_at_once(self, request: InferenceRequest) -> bool:
        """A worker of its model has room, and nobody of its class or a higher one waits for that."""
        if any(
            fair.num_requests for fair in self.backlog.queue(request.model).classes[: request.priority + 1]
        ):
            return False
        share = self.backlog.share(request)
        expected = self.predictor.expect_rest(request)
        return not isinstance(self.router.route(request, expected, None, share), Blocked)

    def _wait_ms(self, request: InferenceRequest, now: int) -> float:
        expected = self.predictor.expect_rest(request)
        weight = self.tenants.weight(request.tenant)
        return self.overload.arrival(request, expected, weight, now).wait_ms
