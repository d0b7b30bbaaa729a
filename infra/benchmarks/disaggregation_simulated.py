"""The simulated part of `disaggregation`: see there."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import infra.simulator
from infra.simulator.measures import Measures
from infra.simulator.pool_ratio import Demand, pool_ratio
from infra.simulator.report import figures
from infra.simulator.scenario import (
    Lengths,
    Model,
    Scenario,
    TenantPlan,
    Traffic,
    Workers,
    step_costs,
)
from infra.simulator.scenario_file import load_scenario
from infra.simulator.simulation import Simulation
from schemas.handoff_records import WorkerRole
from schemas.priority import PriorityClass
from workers.roofline import StepLoad

LONG_PROMPTS = Path(infra.simulator.__file__).parent / "scenarios" / "long_prompts.yaml"
_MODEL = "llama-70b"
_MODELS = {_MODEL: Model("70b")}
_BIG_STEP = 16_384
_ITL_MS = 40.0
_ONE_NODE_LOADS = ((500, 8.0), (500, 24.0), (2_000, 4.0), (2_000, 8.0), (8_000, 1.0), (8_000, 2.0))
_ONE_NODE_ITL_MS = (15.0, 25.0, 40.0)


async def measure(report: Callable[[str], None]) -> dict[str, Any]:
    itl = inter_token_times(load_scenario(LONG_PROMPTS))
    report(f"itl_p99_ms: {itl['itl_p99_ms']}")
    transfer = textbook_transfer()
    report(f"transfer: {transfer}")
    ratio = ratio_against_even()
    report(f"pool_ratio: {ratio}")
    node = one_node()
    for row in node:
        report(f"one node: {row}")
    return {**itl, **transfer, "pool_ratio": ratio, "one_node": node}


def workers(role: WorkerRole, count: int, *, tensor_parallel: int = 2, chunk: int = _BIG_STEP) -> Workers:
    """H100s. `chunk`: prompt tokens of a step at most; with a whole prompt in a step nothing is chunked."""
    return Workers(
        _MODEL,
        "h100",
        count=count,
        tensor_parallel=tensor_parallel,
        role=role,
        max_num_seqs=64 if role is WorkerRole.PREFILL else 128,
        max_num_batched_tokens=max(_BIG_STEP if chunk == _BIG_STEP else 0, chunk + 128),
        max_prefill_chunk=chunk,
        inter_token_target_ms=0.0,
        prefix_caching="off",
    )


def split(num_prefill: int, num_decode: int) -> list[Workers]:
    """Decode workers that take a prompt for once compute it in chunks."""
    return [workers(WorkerRole.PREFILL, num_prefill), workers(WorkerRole.DECODE, num_decode, chunk=512)]


def run(scenario: Scenario) -> tuple[dict[str, Any], Measures]:
    measures = Simulation(scenario, Path()).run()
    return figures(scenario, measures), measures


def inter_token_times(scenario: Scenario) -> dict[str, Any]:
    """Three ways to run the scenario's load on as many GPUs."""
    count = sum(each.count for each in scenario.fleet)
    fleets = {
        "unified": [workers(WorkerRole.UNIFIED, count)],
        "chunked": [workers(WorkerRole.UNIFIED, count, chunk=512)],
        "disaggregated": list(scenario.fleet),
    }
    found: dict[str, dict[str, Any]] = {
        "itl_p99_ms": {},
        "itl_longest_ms": {},
        "ttft_p99_ms": {},
        "goodput_per_s": {},
    }
    for name, fleet in fleets.items():
        told, measures = run(replace(scenario, fleet=fleet))
        found["itl_p99_ms"][name] = round(told["token_gap_ms"][_MODEL]["interactive"]["p99"], 1)
        longest_s = max(measures.gaps[_MODEL][PriorityClass.INTERACTIVE].gap)
        found["itl_longest_ms"][name] = round(1000 * longest_s, 1)
        found["ttft_p99_ms"][name] = {
            kind: round(each["ttft_ms"]["p99"]) for kind, each in told["traffic"].items()
        }
        found["goodput_per_s"][name] = _goodput(told)
    return found


def textbook_transfer() -> dict[str, Any]:
    """2,000 tokens of a 70b model from four GPUs to four, at 50 GB/s, one prompt after the other."""
    fleet = [
        workers(WorkerRole.PREFILL, 1, tensor_parallel=4),
        workers(WorkerRole.DECODE, 1, tensor_parallel=4, chunk=512),
    ]
    # Streams enough that a prompt there would hold somebody up.
    _, measures = run(_chat(fleet, rate=3.0, prompt=2_000, output=400, duration=60.0))
    sent = [each for each in measures.handoffs if each.computed_at >= 10.0]
    if not sent:
        raise RuntimeError("nothing was handed over")
    visible = sorted(1000 * each.visible_s for each in sent)
    num_bytes = sent[0].num_bytes
    return {
        "transfer_visible_ms": round(visible[len(visible) * 99 // 100], 3),
        "transfer_whole_ms": round(num_bytes / 50e9 * 1000, 1),
        "kv_mb": round(num_bytes / 1e6),
        "handed_over_ms": round(1000 * max(each.handed_over_s for each in sent), 1),
        "handoffs": len(sent),
    }


def ratio_against_even(rate: float = 17.0, num_workers: int = 8) -> dict[str, Any]:
    """Prompts of 2,000 and answers of 200 tokens, on eight workers of two GPUs."""
    prompt, output = 2_000, 200
    demand = Demand(rate * prompt, rate * output, prefill_rate(prompt), decode_rate(prompt + output // 2))
    chosen = pool_ratio(demand, num_workers)
    even = num_workers // 2, num_workers - num_workers // 2
    found: dict[str, Any] = {"demand_tokens_per_s": {"prompt": rate * prompt, "output": rate * output}}
    found["one_worker_tokens_per_s"] = {
        "prefill": round(demand.prefill_tokens_per_s), "decode": round(demand.decode_tokens_per_s)
    }  # fmt: skip
    for name, pools in (("chosen", chosen), ("even", even)):
        told, _ = run(_chat(split(*pools), rate=rate, prompt=prompt, output=output, duration=40.0))
        found[name] = {"prefill": pools[0], "decode": pools[1], **_summary(told)}
    return found


def one_node(loads: Sequence[tuple[int, float]] = _ONE_NODE_LOADS) -> list[dict[str, Any]]:
    """Eight GPUs as four workers: unified ones in chunks of some size, and split into pools. Of `loads` of
    (prompt tokens, requests a second) with answers of 200 tokens, by inter-token target: the best of each way
    that meets both targets at p99, None where none does. Pools are worth it where only they do."""
    rows = []
    for prompt, rate in loads:
        ways = {f"chunk {size}": [workers(WorkerRole.UNIFIED, 4, chunk=size)] for size in (128, 256, 512)}
        ways |= {f"pools {n}:{4 - n}": split(n, 4 - n) for n in (1, 2, 3)}
        told = []
        for name, fleet in ways.items():
            chat = _chat(fleet, rate=rate, prompt=prompt, output=200, duration=40.0)
            told.append({"way": name, **_summary(run(chat)[0])})
        for itl_ms in _ONE_NODE_ITL_MS:
            row = {"prompt_tokens": prompt, "rate_per_s": rate, "itl_target_ms": itl_ms}
            good = [
                each
                for each in told
                if each["itl_p99_ms"] <= itl_ms and each["ttft_p99_ms"] <= _ttft_target_ms(prompt)
            ]
            best = {
                way: min(
                    (each for each in good if each["way"].startswith(way)),
                    key=lambda each: float(each["ttft_p99_ms"]),
                    default=None,
                )
                for way in ("chunk", "pools")
            }
            worth_it = best["pools"] is not None and best["chunk"] is None
            rows.append(
                row | {"unified": best["chunk"], "disaggregated": best["pools"], "worth_it": worth_it}
            )
    return rows


def prefill_rate(prompt_tokens: int) -> float:
    """Prompt tokens a second of one worker that does nothing else."""
    costs = step_costs(_MODELS[_MODEL], workers(WorkerRole.PREFILL, 1))
    return prompt_tokens / costs.step_seconds(StepLoad.of([(0, prompt_tokens, True)]))


def decode_rate(context_tokens: int) -> float:
    """Output tokens a second of one worker at its largest batch that meets the inter-token target and
    fits."""
    fleet = workers(WorkerRole.DECODE, 1)
    costs = step_costs(_MODELS[_MODEL], fleet)
    assert fleet.max_num_seqs is not None
    most = min(fleet.max_num_seqs, costs.num_blocks * 16 // context_tokens)
    best = 0.0
    for num_seqs in range(1, most + 1):
        seconds = costs.decode_seconds(num_seqs)(num_seqs * context_tokens)
        if seconds <= _ITL_MS / 1000:
            best = num_seqs / seconds
    return best


def _chat(fleet: list[Workers], *, rate: float, prompt: int, output: int, duration: float) -> Scenario:
    chat = Traffic(
        _MODEL,
        {"a": 1.0},
        rate=rate,
        prompt=Lengths(fixed=prompt),
        output=Lengths(fixed=output),
        target_ttft_ms=_ttft_target_ms(prompt),
        target_itl_ms=_ITL_MS,
    )
    return Scenario(duration, _MODELS, fleet, {"a": TenantPlan()}, {"chat": chat}, seed=3, warm_up=10.0)


def _ttft_target_ms(prompt_tokens: int) -> float:
    """A second, and twice what its own prompt takes."""
    return 1_000.0 + 2_000 * prompt_tokens / prefill_rate(prompt_tokens)


def _goodput(told: dict[str, Any]) -> float:
    return round(float(sum(each["goodput_per_s"] for each in told["traffic"].values())), 2)


def _summary(told: dict[str, Any]) -> dict[str, Any]:
    chat = told["traffic"]["chat"]
    return {
        "goodput_per_s": _goodput(told),
        "ttft_p99_ms": round(chat["ttft_ms"]["p99"]),
        "itl_p99_ms": round(told["token_gap_ms"][_MODEL]["interactive"]["p99"], 1),
    }
