"""Prometheus figures of one admission process. No tenant is ever a label."""

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from schemas.priority import PriorityClass
from streams.admission.affinity import HitMeter
from streams.admission.overload import Outcome
from streams.admission.pairing import Way
from streams.admission.quick_histogram import QuickHistogram
from streams.admission.router import Router

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)
_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ERROR_SECONDS = (-10.0, -2.5, -1.0, -0.25, -0.1, -0.025, 0.0, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "headrace_admission_requests",
            "Records read from inference.requests",
            ["kind"],
            registry=self.registry,
        )
        dispatches = Counter(
            "headrace_admission_dispatches", "Requests given to a worker", ["class"], registry=self.registry
        )
        self._rejections = Counter(
            "headrace_admission_rejections", "Requests refused", ["status", "code"], registry=self.registry
        )
        self.decision_seconds = QuickHistogram(
            "headrace_admission_decision_seconds",
            "From a request's record in hand to the decision about it",
            buckets=_SECONDS,
            registry=self.registry,
        ).labels()
        self.ack_seconds = QuickHistogram(
            "headrace_admission_ack_seconds",
            "From the choice of a worker to the ack of its Dispatch",
            buckets=_SECONDS,
            registry=self.registry,
        ).labels()
        queue_seconds = QuickHistogram(
            "headrace_admission_queue_seconds",
            "Wait of dispatched requests in the queue",
            ["class"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.takeover_seconds = Histogram(
            "headrace_admission_takeover_seconds",
            "From the assignment of a partition until requests are admitted there",
            buckets=_SECONDS,
            registry=self.registry,
        )
        predicted = QuickHistogram(
            "headrace_admission_predicted_first_token_seconds",
            "What was predicted, when they came, of requests that have had their first token",
            ["class"],
            buckets=_FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        real = QuickHistogram(
            "headrace_admission_first_token_seconds",
            "How long it took them, wait here and time at the worker",
            ["class"],
            buckets=_FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        error = QuickHistogram(
            "headrace_admission_first_token_error_seconds",
            "Predicted less real",
            ["class"],
            buckets=_ERROR_SECONDS,
            registry=self.registry,
        )
        queued = Gauge(
            "headrace_admission_queued_requests", "Requests that wait", ["class"], registry=self.registry
        )
        self.decisions_lost = Gauge(
            "headrace_admission_decisions_lost",
            "Decisions the log had no room for",
            registry=self.registry,
        )
        self.fallbacks = Gauge(
            "headrace_admission_fallbacks",
            "Requests that went to a fallback of the model they named",
            registry=self.registry,
        )
        hits = Gauge(
            "headrace_admission_prefix_hit_tokens",
            "Cached prompt tokens of requests that ended: predicted, actual, and the difference both ways",
            ["kind"],
            registry=self.registry,
        )
        self._hits = {name: hits.labels(name) for name in HitMeter.__slots__}
        ways = Gauge(
            "headrace_admission_routed_requests",
            "Requests in fleets with prefill and decode workers, by the way they went",
            ["way"],
            registry=self.registry,
        )
        self._ways = {way: ways.labels(way.value) for way in Way}
        self._missing = Gauge(
            "headrace_admission_missing_pool",
            "1 while workers of the model lack a partner of the role, and serve whole requests",
            ["model", "role"],
            registry=self.registry,
        )
        self.workers = Gauge("headrace_admission_workers", "Workers that live", registry=self.registry)
        # A labels() lookup per request costs more than the increment.
        self.dispatches = [dispatches.labels(c.label) for c in PriorityClass]
        self.queued = [queued.labels(c.label) for c in PriorityClass]
        self.queue_seconds = [queue_seconds.labels(c.label) for c in PriorityClass]
        self._first_tokens = [
            (predicted.labels(c.label), real.labels(c.label), error.labels(c.label)) for c in PriorityClass
        ]
        self.read_requests = self._requests.labels("request")
        self.read_cancellations = self._requests.labels("cancellation")
        self.read_skipped = self._requests.labels("skipped")
        self.read_bad = self._requests.labels("bad")

    def first_tokens(self, outcomes: deque[Outcome]) -> None:
        """Takes them out."""
        while outcomes:
            outcome = outcomes.popleft()
            predicted, real, error = self._first_tokens[outcome.priority]
            predicted.observe(outcome.predicted_ms / 1_000)
            real.observe(outcome.real_ms / 1_000)
            error.observe((outcome.predicted_ms - outcome.real_ms) / 1_000)

    def prefix_hits(self, meter: HitMeter) -> None:
        for name, gauge in self._hits.items():
            gauge.set(getattr(meter, name))

    def routed(self, router: Router) -> None:
        """In a fleet without prefill and decode workers there is nothing to tell."""
        for way, count in router.ways.items():
            self._ways[way].set(count)
        for model, role, is_missing in router.pool_states():
            self._missing.labels(model, role).set(is_missing)

    def rejected(self, status: int, code: str) -> None:
        self._rejections.labels(str(status), code).inc()
