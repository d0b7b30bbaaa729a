"""Prometheus figures of one admission process. No tenant is ever a label."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from schemas.priority import PriorityClass

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)


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
        self.decision_seconds = Histogram(
            "headrace_admission_decision_seconds",
            "From a request's record in hand to the decision about it",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.ack_seconds = Histogram(
            "headrace_admission_ack_seconds",
            "From the choice of a worker to the ack of its Dispatch",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "headrace_admission_queue_seconds",
            "Wait of dispatched requests in the queue",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.takeover_seconds = Histogram(
            "headrace_admission_takeover_seconds",
            "From the assignment of a partition until requests are admitted there",
            buckets=_SECONDS,
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
        self.workers = Gauge("headrace_admission_workers", "Workers that live", registry=self.registry)
        # A labels() lookup per request costs more than the increment.
        self.dispatches = [dispatches.labels(c.label) for c in PriorityClass]
        self.queued = [queued.labels(c.label) for c in PriorityClass]
        self.read_requests = self._requests.labels("request")
        self.read_cancellations = self._requests.labels("cancellation")
        self.read_skipped = self._requests.labels("skipped")
        self.read_bad = self._requests.labels("bad")

    def rejected(self, status: int, code: str) -> None:
        self._rejections.labels(str(status), code).inc()
