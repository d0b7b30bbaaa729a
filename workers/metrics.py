"""Figures of one worker under the names that dashboards and autoscalers already read (vLLM's)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from workers.engine_stats import EngineStats
from workers.live_requests import LiveRequest
from workers.request import FinishReason

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LABELS = ("model_name",)


class Histogram:
    """Counts per bucket, found by bisection: it is fed once a token, and prometheus_client's takes 3 µs."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum, as prometheus_client wants them."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self._sum


class WorkerMetrics:
    """A prometheus_client collector. All methods run in the event loop; times in seconds."""

    def __init__(
        self, model: str, stats: Callable[[], EngineStats], decisions_dropped: Callable[[], int] = lambda: 0
    ) -> None:
        self._model = model
        self._stats = stats
        self._decisions_dropped = decisions_dropped
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._ended: Counter[str] = Counter()
        self._first_token = Histogram()
        self._inter_token = Histogram()
        self._e2e = Histogram()
        self._queue = Histogram()
        self._prefill = Histogram()
        self._decode = Histogram()

    def on_admitted(self, live: LiveRequest, now: float) -> None:
        """It left the engine's queue; a preempted one does so again, which counts once."""
        if live.admitted is None:
            live.admitted = now
            self._queue.observe(now - live.arrived)

    def on_tokens(self, live: LiveRequest, num_tokens: int, now: float) -> None:
        self._generation_tokens += num_tokens
        if live.last_token is None:
            live.first_token = now
            self._prompt_tokens += len(live.request.prompt_token_ids)
            self._first_token.observe(now - live.arrived)
            self._prefill.observe(now - (live.arrived if live.admitted is None else live.admitted))
        else:
            self._inter_token.observe(now - live.last_token)
        live.last_token = now

    def on_end(self, live: LiveRequest, reason: FinishReason, now: float) -> None:
        self._ended[reason] += 1
        self._e2e.observe(now - live.arrived)
        if live.first_token is not None and live.last_token is not None:
            self._decode.observe(live.last_token - live.first_token)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = 1 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences in the running batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", sum(stats.num_waiting))
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", used)
        yield self._counter("vllm:num_preemptions", "Sequences that gave up blocks.", stats.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up.", stats.prefix_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found computed.", stats.prefix_cache_hits)
        yield from self._about_engine(stats)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens prefilled.", self._prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", self._generation_tokens)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests ended, by reason.", labels=(*_LABELS, "finished_reason")
        )
        for reason, count in self._ended.items():
            success.add_metric((self._model, reason), count)
        yield success
        for name, doc, histogram in (
            ("vllm:time_to_first_token_seconds", "Dispatch read to first token.", self._first_token),
            ("vllm:inter_token_latency_seconds", "Between tokens of a sequence.", self._inter_token),
            ("vllm:e2e_request_latency_seconds", "Dispatch read to end.", self._e2e),
            ("vllm:request_queue_time_seconds", "Dispatch read to first scheduled.", self._queue),
            ("vllm:request_prefill_time_seconds", "First scheduled to first token.", self._prefill),
            ("vllm:request_decode_time_seconds", "First token to last.", self._decode),
        ):
            family = HistogramMetricFamily(name, doc, labels=_LABELS)
            family.add_metric((self._model,), *histogram.buckets())
            yield family

    def _about_engine(self, stats: EngineStats) -> Iterator[Metric]:
        """What vLLM has no name for."""
        hosted = 1 - stats.free_host_blocks / stats.num_host_blocks if stats.num_host_blocks else 0.0
        preemptions = CounterMetricFamily(
            "headrace_preemptions", "Preemptions.", labels=(*_LABELS, "reason", "mode")
        )
        for (reason, mode), count in stats.preemptions.items():
            preemptions.add_metric((self._model, reason, mode), count)
        yield preemptions
        for name, doc, value in (
            ("headrace_kv_fragmentation", "Share of held KV slots without a token.", stats.kv_fragmentation),
            ("headrace_swap_usage_perc", "Host blocks for swapped KV in use; 1 is all of them.", hosted),
            ("headrace_step_seconds", "Running mean of a step.", stats.step_time_ms / 1000),
            (
                "headrace_predicted_step_seconds",
                "What the last step was predicted to take.",
                stats.predicted_step_ms / 1000,
            ),
        ):
            yield self._gauge(name, doc, value)
        yield self._counter(
            "headrace_decisions_dropped",
            "Records left out of fleet.decisions.",
            self._decisions_dropped(),
        )

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, doc, labels=_LABELS)
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(name, doc, labels=_LABELS)
        family.add_metric((self._model,), value)
        return family
