"""The load of each model, read when somebody asks for it."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from schemas.priority import PriorityClass
from streams.admission.overload import Overload
from streams.admission.shedding import ShedLevel


class LoadFigures(Collector):
    """Tokens per GPU-second are the rate of served tokens over the rate of GPU seconds; with several
    admission processes the tokens add up, and each counts all GPUs.
    """

    def __init__(self, overload: Overload) -> None:
        self._overload = overload

    def collect(self) -> Iterator[Metric]:
        level = GaugeMetricFamily(
            "headrace_admission_shed_level",
            "0 nothing, 1 batch paused, 2 free capped, 3 fair share, 4 free refused",
            labels=["model"],
        )
        kv_use = GaugeMetricFamily(
            "headrace_admission_kv_use", "KV blocks in use or claimed, 0 to 1", labels=["model"]
        )
        drain = GaugeMetricFamily(
            "headrace_admission_drain_tokens_per_second",
            "Prompt and expected output that leaves the queue while something waits there",
            labels=["model", "class"],
        )
        for model, figures in self._overload.levels().items():
            for family, value in zip((level, kv_use), figures, strict=True):
                family.add_metric([model], float(value))
        for model, rates in self._overload.drain_rates().items():
            for priority, rate in zip(PriorityClass, rates, strict=True):
                drain.add_metric([model, priority.label], rate)
        yield from (level, kv_use, drain)
        shed = CounterMetricFamily(
            "headrace_admission_shed_requests",
            "Answers cut short, and requests refused, by the level that did it",
            labels=["level"],
        )
        for what in (ShedLevel.CAP_FREE, ShedLevel.FAIR_SHARE, ShedLevel.REFUSE_FREE):
            shed.add_metric([what.label], self._overload.shed[what])
        yield shed
        served = CounterMetricFamily(
            "headrace_admission_served_tokens",
            "Input and output tokens of requests that were dispatched here and have ended",
            labels=["model"],
        )
        seconds = CounterMetricFamily(
            "headrace_admission_gpu_seconds",
            "Time of the GPUs of workers that live; a worker without any counts as one",
            labels=["model"],
        )
        for model, (tokens, gpu_ms) in self._overload.work().items():
            served.add_metric([model], tokens)
            seconds.add_metric([model], gpu_ms / 1_000)
        yield from (served, seconds)

    def describe(self) -> Iterator[Metric]:
        return iter(())
