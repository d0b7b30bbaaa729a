"""Reads a scenario file and says what is wrong with it: each error names its field."""

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec

from infra.simulator.scenario import (
    Lengths,
    Scenario,
    Traffic,
    Workers,
    admission_config,
    scheduler_config,
    step_costs,
)
from schemas.handoff_records import WorkerRole
from schemas.priority import PriorityClass
from schemas.records import ClassLimits
from schemas.topics import check_tenant
from workers.roofline import DEVICES, MODELS

_LIMITS = [field.name for field in dataclasses.fields(ClassLimits) if field.name != "priority"]


class ScenarioError(ValueError):
    """The message names the file and the field."""


def load_scenario(path: Path) -> Scenario:
    """Raises ScenarioError for what is not there or not right."""
    try:
        return parse_scenario(path.read_bytes(), str(path), path.parent)
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from None


def parse_scenario(text: bytes, source: str, folder: Path) -> Scenario:
    """`folder` is where its trace files lie."""
    try:
        scenario = msgspec.yaml.decode(text, type=Scenario)
    except msgspec.DecodeError as error:  # ValidationError among them: it says where
        raise ScenarioError(f"{source}: {error}") from None
    if errors := _errors(scenario, folder):
        raise ScenarioError(f"{source}: {'; '.join(errors)}")
    return scenario


def _errors(scenario: Scenario, folder: Path) -> list[str]:
    found = []
    for name, model in scenario.models.items():
        if model.shape is not None and model.shape not in MODELS:
            found.append(f"$.models.{name}.shape: {model.shape!r} is none of {', '.join(MODELS)}")
    if found:
        return found
    for index, workers in enumerate(scenario.fleet):
        found += [f"$.fleet[{index}].{text}" for text in _worker_errors(scenario, workers)]
    for name, tenant in scenario.tenants.items():
        found += _raised(f"$.tenants: {name}", partial(check_tenant, name))
        for limit in tenant.limits:
            if limit not in _LIMITS:
                found.append(f"$.tenants.{name}.limits: {limit!r} is none of {', '.join(_LIMITS)}")
        found += _raised(f"$.tenants.{name}.tier", partial(PriorityClass.parse, tenant.tier))
    for name, traffic in scenario.traffic.items():
        found += [f"$.traffic.{name}.{text}" for text in _traffic_errors(scenario, traffic, folder)]
    for name, backlog in scenario.backlogs.items():
        where = f"$.backlogs.{name}"
        if backlog.tenant not in scenario.tenants:
            found.append(f"{where}.tenant: {backlog.tenant!r} is not in tenants")
        found += [f"{where}.{text}" for text in _model_errors(scenario, backlog.model)]
        found += _length_errors(f"{where}.prompt", backlog.prompt)
        found += _length_errors(f"{where}.output", backlog.output)
    num_slots = sum(workers.count for workers in scenario.fleet)
    for index, failure in enumerate(scenario.failures):
        if failure.slot >= num_slots:
            found.append(f"$.failures[{index}].slot: there are {num_slots} slots, from 0 on")
        if failure.back_at is not None and failure.back_at <= failure.at:
            found.append(f"$.failures[{index}].back_at: must be after at")
    found += _raised("$.policy", partial(admission_config, scenario.policy))
    if scenario.warm_up >= scenario.duration:
        found.append("$.warm_up: must be shorter than duration")
    return found


def _worker_errors(scenario: Scenario, workers: Workers) -> list[str]:
    if workers.model not in scenario.models:
        return [f"model: {workers.model!r} is not in models"]
    model = scenario.models[workers.model]
    measured = workers.measured
    if (workers.gpu is None) == (measured is None):
        return ["gpu: give it, or measured instead"]
    if workers.gpu is not None:
        if workers.gpu not in DEVICES:
            return [f"gpu: {workers.gpu!r} is none of {', '.join(DEVICES)}"]
        if model.shape is None:
            return [f"model: {workers.model!r} has no shape, which a gpu needs"]
    if measured is not None:
        if workers.swap_memory_mib:
            return ["swap_memory_mib: must be 0 where a worker is measured"]
        if not measured.step_ms + measured.seq_ms:
            return ["measured.step_ms: must be above 0 where seq_ms is 0"]
        if workers.role is not WorkerRole.UNIFIED:
            return ["role: a worker that is measured is unified: what its KV weighs is not known"]
    if workers.prefix_caching not in ("tenant", "shared", "off"):
        return [f"prefix_caching: {workers.prefix_caching!r} is none of tenant, shared, off"]
    return _raised("tensor_parallel", partial(step_costs, model, workers)) or _raised(
        "max_num_batched_tokens", partial(scheduler_config, model, workers)
    )


def _traffic_errors(scenario: Scenario, traffic: Traffic, folder: Path) -> list[str]:
    found = [
        f"tenants: {name!r} is not in tenants" for name in traffic.tenants if name not in scenario.tenants
    ]
    found += _model_errors(scenario, traffic.model)
    found += _raised("priority", partial(PriorityClass.parse, traffic.priority))
    if traffic.trace is not None:
        if not (folder / traffic.trace).is_file():
            found.append(f"trace: there is no file {folder / traffic.trace}")
        if traffic.rate or traffic.bursts or traffic.waves or traffic.spikes:
            found.append("trace: says when all arrive; rate, bursts, waves and spikes must go")
    elif traffic.prompt is None or traffic.output is None:
        found.append("prompt: without a trace, prompt and output must be given")
    for name, lengths in (("prompt", traffic.prompt), ("output", traffic.output)):
        if lengths is not None:
            found += _length_errors(name, lengths)
    for index, spike in enumerate(traffic.spikes):
        if spike.until <= spike.at:
            found.append(f"spikes[{index}].until: must be after at")
    return found


def _model_errors(scenario: Scenario, model: str) -> list[str]:
    if any(workers.model == model for workers in scenario.fleet):
        return []
    return [f"model: no worker of the fleet serves {model!r}"]


def _length_errors(where: str, lengths: Lengths) -> list[str]:
    kinds = (lengths.fixed, lengths.lognormal, lengths.histogram)
    if sum(kind is not None for kind in kinds) != 1:
        return [f"{where}: give one of fixed, lognormal, histogram"]
    bins = lengths.histogram or []
    if any(later[0] <= earlier[0] for earlier, later in pairwise(bins)):
        return [f"{where}.histogram: bins must ascend"]
    if bins and not sum(weight for _, weight in bins):
        return [f"{where}.histogram: all weights are 0"]
    if lengths.least > lengths.most:
        return [f"{where}.least: is above most"]
    return []


def _raised(where: str, check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ValueError as error:
        return [f"{where}: {error}"]
    return []
