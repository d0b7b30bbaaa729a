"""The figures over time, as a picture."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(figures: dict[str, Any], title: str, path: Path) -> None:
    """Writes a PNG. `figures` are those of `report.figures`. Raises OSError."""
    series = figures["series"]
    at, priority = series["at_s"], series["class"]
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(3, 2, sharex=True)
    for place, name, label in (
        (axes[0][0], "ttft_ms", f"time to first token, {priority}, ms"),
        (axes[0][1], "token_gap_ms", f"time between tokens, {priority}, ms"),
        (axes[1][0], "queued_ms", f"wait before the dispatch, {priority}, ms"),
    ):
        for share, values in series[name].items():
            _line(place, at, values, share)
        place.set_title(label, fontsize=10)
        place.legend(fontsize=8)
    _line(axes[1][1], at, series["kv_use"])
    axes[1][1].set_title("share of KV blocks in use", fontsize=10)
    axes[1][1].set_ylim(0, 1)
    _line(axes[2][0], at, series["shed_rate"])
    axes[2][0].set_title(f"share of requests refused, {priority}", fontsize=10)
    axes[2][0].set_ylim(0, 1)
    by_class = series["output_tokens_per_gpu_s"]
    if by_class:
        axes[2][1].stackplot(at, *by_class.values(), labels=list(by_class))
        axes[2][1].legend(fontsize=8)
    axes[2][1].set_title("output tokens per GPU and second", fontsize=10)
    for place in axes[2]:
        place.set_xlabel("s")
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _line(place: Axes, at: list[float], values: list[float | None], label: str = "") -> None:
    """Gaps where there was nothing."""
    place.plot(at, [float("nan") if value is None else value for value in values], label=label or None)
    place.grid(alpha=0.3)
