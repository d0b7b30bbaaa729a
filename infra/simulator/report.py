"""Figures of a simulated run, as JSON: by traffic, tenant, model and class, worker, and over time.

Only requests that arrived after the warm-up count, and what ends and comes between it and the scenario's
duration, whenever it arrived: `finished_per_s` is what a fleet carries, however long its queue. Times
to the first token are the client's: a record's way back from the worker is in them. Percentiles are those of
the values themselves, weighted by how many sequences waited.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.simulator.measures import Flight, GapLog, Measures
from infra.simulator.scenario import Scenario
from schemas.priority import PriorityClass

NUM_WINDOWS = 60
_SHARES = (0.5, 0.9, 0.95, 0.99)
Floats = npt.NDArray[np.float64]


def figures(scenario: Scenario, measures: Measures) -> dict[str, Any]:
    """Everything the simulation has to say, in types that JSON knows."""
    flights = [f for f in measures.flights if f.arrival.at >= scenario.warm_up]
    finished = Counter(f.arrival.traffic for f in measures.flights if _is_finished_within(f, scenario))
    by_traffic: defaultdict[str, list[Flight]] = defaultdict(list)
    by_tenant: defaultdict[str, list[Flight]] = defaultdict(list)
    for flight in flights:
        by_traffic[flight.arrival.traffic].append(flight)
        by_tenant[flight.arrival.tenant].append(flight)
    span = scenario.duration - scenario.warm_up
    handoffs = _handoffs(scenario, measures)
    return {
        "duration_s": scenario.duration,
        "seed": scenario.seed,
        "gpus": scenario.num_gpus,
        "traffic": {
            name: _of_traffic(scenario, name, some, finished[name])
            for name, some in sorted(by_traffic.items())
        },
        "tenants": {name: _of_tenant(some, span) for name, some in sorted(by_tenant.items())},
        "token_gap_ms": _token_gaps(scenario, measures),
        "fleet": _of_fleet(scenario, measures, flights),
        **({} if handoffs is None else {"handoffs": handoffs}),
        "series": series(scenario, measures),
    }


def _of_traffic(scenario: Scenario, name: str, flights: list[Flight], num_finished: int) -> dict[str, Any]:
    span = scenario.duration - scenario.warm_up
    hop_s = scenario.delays.hop_ms / 1000
    traffic = scenario.traffic.get(name)
    max_ttft = traffic.target_ttft_ms if traffic and traffic.target_ttft_ms else float("inf")
    max_itl = traffic.target_itl_ms if traffic and traffic.target_itl_ms else float("inf")
    served = [f for f in flights if _is_served(f)]
    ttft = [1000 * (_first_token(f) + hop_s - f.arrival.at) for f in served]
    itl = [1000 * (f.last_token_at - _first_token(f)) / max(1, f.num_tokens - 1) for f in served]
    waits = [1000 * (f.dispatched_at - f.arrival.at) for f in served if f.dispatched_at is not None]
    well = sum(a <= max_ttft and b <= max_itl for a, b in zip(ttft, itl, strict=True))
    return {
        "requests": len(flights),
        "served": len(served),
        "refused": dict(Counter(f"{f.refused_status} {f.refused}" for f in flights if f.refused)),
        "failed": dict(Counter(f.failed for f in flights if f.failed)),
        "offered_per_s": len(flights) / span,
        "goodput_per_s": well / span,
        "finished_per_s": num_finished / span,
        "ttft_ms": percentiles(ttft),
        "time_per_output_token_ms": percentiles(
            [x for x, f in zip(itl, served, strict=True) if f.num_tokens > 1]
        ),
        "queued_ms": percentiles(waits),
        "prompt_tokens": sum(f.arrival.num_prompt_tokens for f in served),
        "cached_tokens": sum(f.num_cached_tokens for f in served),
        "output_tokens": sum(f.num_tokens for f in served),
    }


def _of_tenant(flights: list[Flight], span: float) -> dict[str, Any]:
    served = [f for f in flights if _is_served(f)]
    return {
        "requests": len(flights),
        "served": len(served),
        "refused": sum(f.refused is not None for f in flights),
        "tokens_per_s": sum(f.arrival.num_prompt_tokens + f.num_tokens for f in served) / span,
        "ttft_ms": percentiles([1000 * (_first_token(f) - f.arrival.at) for f in served]),
    }


def _token_gaps(scenario: Scenario, measures: Measures) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model, logs in sorted(measures.gaps.items()):
        found[model] = {}
        for priority, log in zip(PriorityClass, logs, strict=True):
            at, gap, count = _arrays(log)
            inside = (at >= scenario.warm_up) & (at < scenario.duration)
            if inside.any():
                found[model][priority.label] = percentiles(1000 * gap[inside], count[inside])
    return found


def _handoffs(scenario: Scenario, measures: Measures) -> dict[str, Any] | None:
    """`visible_ms`: how long a transfer went on when the prompt was computed; `handed_over_ms`: until decode
    had the request. None where none was made."""
    some = [h for h in measures.handoffs if scenario.warm_up <= h.computed_at < scenario.duration]
    if not some:
        return None
    return {
        "count": len(some),
        "gb_per_s": sum(h.num_bytes for h in some) / 1e9 / (scenario.duration - scenario.warm_up),
        "visible_ms": percentiles([1000 * h.visible_s for h in some]),
        "handed_over_ms": percentiles([1000 * h.handed_over_s for h in some]),
    }


def _of_fleet(scenario: Scenario, measures: Measures, flights: list[Flight]) -> dict[str, Any]:
    samples = [s for s in measures.samples if scenario.warm_up <= s.at < scenario.duration]
    kv_use = [use for sample in samples for use in sample.kv_use.values()]
    by_slot = Counter(f.slot for f in flights if f.slot >= 0)
    num_slots = sum(workers.count for workers in scenario.fleet)
    mean = by_slot.total() / num_slots
    tokens, _ = _tokens_by_window(scenario, measures, 1, scenario.warm_up)
    span = scenario.duration - scenario.warm_up
    return {
        "output_tokens_per_gpu_s": float(tokens.sum()) / span / scenario.num_gpus,
        "kv_use_mean": float(np.mean(kv_use)) if kv_use else 0.0,
        "kv_use_max": max(kv_use, default=0.0),
        "running_mean": float(np.mean([s.num_running for s in samples])) if samples else 0.0,
        "hottest_worker": max(by_slot.values(), default=0) / mean if mean else 0.0,
        "prefix_hit_rate": measures.num_prefix_hits / max(1, measures.num_prefix_queries),
        "preemptions": measures.num_preemptions,
        "retries": measures.num_retries,
        "steps": measures.num_steps,
        "steps_leapt": measures.num_steps_leapt,
        "ended_at_s": measures.ended_at,
    }


def series(scenario: Scenario, measures: Measures, num_windows: int = NUM_WINDOWS) -> dict[str, Any]:
    """Over the whole duration in equal windows; None where nothing was to be seen. `at_s` are their starts.

    Times are those of the highest class that there is; tokens are by class.
    """
    width = scenario.duration / num_windows
    highest = min((f.arrival.priority for f in measures.flights), default=PriorityClass.INTERACTIVE)
    ttft: list[list[float]] = [[] for _ in range(num_windows)]
    waits: list[list[float]] = [[] for _ in range(num_windows)]
    asked, refused = [0] * num_windows, [0] * num_windows
    hop_s = scenario.delays.hop_ms / 1000
    for flight in measures.flights:
        index = int(flight.arrival.at / width)
        if flight.arrival.priority is not highest or index >= num_windows:
            continue
        asked[index] += 1
        refused[index] += flight.refused is not None
        if flight.first_token_at is not None:
            ttft[index].append(1000 * (flight.first_token_at + hop_s - flight.arrival.at))
        if flight.dispatched_at is not None:
            waits[index].append(1000 * (flight.dispatched_at - flight.arrival.at))
    tokens, gaps = _tokens_by_window(scenario, measures, num_windows, 0.0, highest)
    kv_use: list[list[float]] = [[] for _ in range(num_windows)]
    for sample in measures.samples:
        index = int(sample.at / width)
        if index < num_windows:
            kv_use[index] += sample.kv_use.values()
    per_gpu_s = tokens / width / scenario.num_gpus
    return {
        "at_s": [index * width for index in range(num_windows)],
        "class": highest.label,
        "ttft_ms": _over_time(ttft),
        "token_gap_ms": gaps,
        "queued_ms": _over_time(waits),
        "kv_use": [float(np.mean(some)) if some else None for some in kv_use],
        "shed_rate": [r / a if a else None for r, a in zip(refused, asked, strict=True)],
        "output_tokens_per_gpu_s": {
            priority.label: per_gpu_s[priority].tolist()
            for priority in PriorityClass
            if tokens[priority].any()
        },
    }


def percentiles(
    values: Sequence[float] | Floats, weights: npt.NDArray[np.int64] | None = None
) -> dict[str, float] | None:
    """p50, p90, p95, p99: the smallest value that at least that share do not exceed; None of nothing."""
    if not len(values):
        return None
    array = np.asarray(values, np.float64)
    order = np.argsort(array)
    total = np.cumsum(np.ones(len(array), np.int64) if weights is None else weights[order])
    places = np.searchsorted(total, np.ceil(np.array(_SHARES) * total[-1]))
    return {f"p{share * 100:.0f}": float(array[order[p]]) for share, p in zip(_SHARES, places, strict=True)}


def _tokens_by_window(
    scenario: Scenario,
    measures: Measures,
    num_windows: int,
    start: float,
    highest: PriorityClass | None = None,
) -> tuple[Floats, dict[str, list[float | None]]]:
    """Output tokens by class and window, and the percentiles of the gaps of class `highest` by window."""
    edges = np.linspace(start, scenario.duration, num_windows + 1)
    tokens = np.zeros((len(PriorityClass), num_windows))
    firsts = [
        (f.first_token_at, f.arrival.priority) for f in measures.flights if f.first_token_at is not None
    ]
    gaps: dict[str, list[float | None]] = {}
    for priority in PriorityClass:
        tokens[priority] += np.histogram([at for at, c in firsts if c is priority], edges)[0]
        logs = [_arrays(log[priority]) for log in measures.gaps.values()]
        for at, _, count in logs:
            tokens[priority] += np.histogram(at, edges, weights=count)[0]
        if priority is highest and logs:
            at, gap, count = (np.concatenate(parts) for parts in zip(*logs, strict=True))
            window = np.searchsorted(edges, at, "right") - 1
            found = [percentiles(1000 * gap[window == i], count[window == i]) for i in range(num_windows)]
            gaps = {name: [None if p is None else p[name] for p in found] for name in ("p50", "p99")}
    return tokens, gaps


def _over_time(values: Iterable[list[float]]) -> dict[str, list[float | None]]:
    found = [percentiles(some) for some in values]
    return {name: [None if p is None else p[name] for p in found] for name in ("p50", "p99")}


def _arrays(log: GapLog) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    return np.array(log.at), np.array(log.gap), np.array(log.count, np.int64)


def _is_served(flight: Flight) -> bool:
    return flight.ended_at is not None and flight.refused is None and flight.failed is None


def _is_finished_within(flight: Flight, scenario: Scenario) -> bool:
    at = flight.ended_at
    return at is not None and scenario.warm_up <= at < scenario.duration and _is_served(flight)


def _first_token(flight: Flight) -> float:
    assert flight.first_token_at is not None
    return flight.first_token_at
