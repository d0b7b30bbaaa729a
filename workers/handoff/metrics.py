"""Figures of a worker's handoffs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from workers.metrics import Histogram

if TYPE_CHECKING:
    from workers.handoff.role import HandoffRole
    from workers.handoff.write_lane import WriteCounters


class HandoffMetrics:
    """A prometheus_client collector. `observe_visible` is told for how long a transfer went on after its last
    token was computed (seconds)."""

    def __init__(self) -> None:
        self.role: HandoffRole | None = None
        self.written: WriteCounters | None = None
        self._visible = Histogram()

    def observe_visible(self, seconds: float) -> None:
        self._visible.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        role = self.role
        if role is None:
            return
        outcomes = CounterMetricFamily("headrace_handoffs", "What became of handoffs.", labels=("outcome",))
        for outcome, count in role.counts.items():
            outcomes.add_metric((outcome,), count)
        yield outcomes
        live = "Handoffs that are not over, or hold blocks."
        yield GaugeMetricFamily("headrace_handoffs_live", live, role.num_live)
        fenced = "Blocks of handoffs that are over, kept because a write may still land in them."
        yield GaugeMetricFamily("headrace_handoff_fenced_blocks", fenced, role.num_fenced_blocks)
        written = self.written
        if written is None:
            return
        for name, doc, value in (
            ("headrace_kv_sent_bytes", "KV that was written to other workers.", written.num_bytes),
            ("headrace_kv_writes", "Calls of the transfer engine.", written.num_calls),
            ("headrace_kv_failed_writes", "Of these failed.", written.num_failures),
            ("headrace_kv_write_seconds", "Time in them.", written.busy_s),
            ("headrace_kv_queue_seconds", "How long KV had waited for them.", written.queued_s),
        ):
            yield CounterMetricFamily(name, doc, value)
        doc = "From the last token computed to the last byte written."
        visible = HistogramMetricFamily("headrace_transfer_visible_seconds", doc)
        visible.add_metric((), *self._visible.buckets())
        yield visible
