"""What a gateway measures. The histograms per token are own lists: prometheus_client's take 2 µs a time."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from schemas.priority import PriorityClass

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)


def _label(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(bound)


class FastHistogram:
    """Counts of observations (seconds) by upper bound. For one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        cumulative, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            cumulative += count
            found.append((_label(bound), float(cumulative)))
        return found


class Timing:
    """Time to first token and between tokens, of one class."""

    __slots__ = ("between", "first")

    def __init__(self) -> None:
        self.first = FastHistogram(_TTFT_BUCKETS)
        self.between = FastHistogram(_ITL_BUCKETS)


class _Histograms(Collector):
    def __init__(self, timings: dict[PriorityClass, Timing]) -> None:
        self._timings = timings

    def collect(self) -> Iterable[HistogramMetricFamily]:
        yield self._family(
            "gen_ai_server_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            lambda t: t.first,
        )
        yield self._family(
            "gen_ai_server_time_per_output_token_seconds",
            "Between two deliveries of tokens to a stream",
            lambda t: t.between,
        )

    def _family(self, name: str, doc: str, pick: Callable[[Timing], FastHistogram]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, doc, labels=["priority"])
        for priority, timing in self._timings.items():
            histogram = pick(timing)
            family.add_metric([priority.label], histogram.buckets(), histogram.total)
        return family

    def describe(self) -> Iterator[HistogramMetricFamily]:
        return iter(())


class Metrics:
    """All of a gateway's metrics, in a registry of their own. No label is a tenant."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.timings = {priority: Timing() for priority in PriorityClass}
        self.registry.register(_Histograms(self.timings))
        self.requests = Counter(
            "headrace_gateway_requests", "HTTP answers by status", ["status"], registry=self.registry
        )
        self.running_streams = Gauge(
            "headrace_gateway_running_streams", "Requests with a client waiting", registry=self.registry
        )
        self.in_flight = Gauge(
            "headrace_gateway_in_flight_requests", "HTTP requests being answered", registry=self.registry
        )
        self.body_bytes = Gauge(
            "headrace_gateway_body_bytes", "Bytes of request bodies in memory", registry=self.registry
        )
        self.open_requests = Gauge(
            "headrace_gateway_open_requests", "Requests without an end in the log", registry=self.registry
        )
        self.output_tokens = Counter(
            "headrace_gateway_output_tokens", "Output tokens of ended requests", registry=self.registry
        )
        self.ends = Counter(
            "headrace_gateway_request_ends",
            "Ends of owned requests by finish reason, error code, or why it was stopped",
            ["reason"],
            registry=self.registry,
        )
        self.undecodable = Counter(
            "headrace_gateway_undecodable_records",
            "Records that could not be read",
            ["topic"],
            registry=self.registry,
        )

    def on_status(self, status: int) -> None:
        self.requests.labels(str(status)).inc()
