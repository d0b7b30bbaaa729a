"""What a scenario file may say, and what is said about one that is wrong."""

from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import msgspec
import pytest

from infra.simulator.scenario import Lengths, Lognormal, Scenario
from infra.simulator.scenario_file import ScenarioError, load_scenario, parse_scenario
from infra.simulator.workload import Arrival, arrivals, length_sampler

CHAT: dict[str, Any] = {
    "model": "m",
    "tenants": {"a": 1, "b": 3},
    "rate": 50.0,
    "prompt": {"fixed": 300},
    "output": {"fixed": 20},
}
PLAN: dict[str, Any] = {
    "duration": 100.0,
    "models": {"m": {"shape": "8b"}},
    "fleet": [{"model": "m", "gpu": "h100"}],
    "tenants": {"a": {}, "b": {}},
    "traffic": {"chat": CHAT},
}


def scenario(**changes: Any) -> Scenario:
    return parse_scenario(msgspec.yaml.encode(PLAN | changes), "plan", Path())


def chat(**changes: Any) -> list[Arrival]:
    return list(arrivals(scenario(traffic={"chat": CHAT | changes}), Path()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"durations": 3}, "durations"),
        ({"duration": 0}, "$.duration"),
        ({"warm_up": 100.0}, "$.warm_up: must be shorter than duration"),
        ({"models": {"m": {"shape": "9b"}}}, "$.models.m.shape: '9b' is none of 8b, 70b"),
        ({"fleet": [{"model": "m", "gpu": "a100"}]}, "$.fleet[0].gpu: 'a100' is none of"),
        ({"fleet": [{"model": "m"}]}, "$.fleet[0].gpu: give it, or measured instead"),
        ({"models": {"m": {}}}, "$.fleet[0].model: 'm' has no shape, which a gpu needs"),
        (
            {"fleet": [{"model": "m", "measured": {"num_blocks": 9, "step_ms": 5}}]},
            "$.fleet[0].swap_memory_mib: must be 0 where a worker is measured",
        ),
        (
            {"fleet": [{"model": "m", "measured": {"num_blocks": 9, "step_ms": 0}, "swap_memory_mib": 0}]},
            "$.fleet[0].measured.step_ms: must be above 0 where seq_ms is 0",
        ),
        ({"fleet": [{"model": "x", "gpu": "h100"}]}, "$.fleet[0].model: 'x' is not in models"),
        (
            {"fleet": [{"model": "m", "gpu": "h100", "memory_share": 0.05}]},
            "$.fleet[0].tensor_parallel: 8 GB of weights leave no room",
        ),
        (
            {"fleet": [{"model": "m", "gpu": "h100", "max_num_seqs": 600}]},
            "$.fleet[0].max_num_batched_tokens: max_num_batched_tokens (512) must be at least",
        ),
        ({"tenants": {"a": {"tier": "gold"}, "b": {}}}, "$.tenants.a.tier: unknown priority class 'gold'"),
        (
            {"traffic": {"chat": CHAT | {"tenants": {"c": 1}}}},
            "$.traffic.chat.tenants: 'c' is not in tenants",
        ),
        ({"traffic": {"chat": CHAT | {"rate": -1}}}, "rate"),
        ({"traffic": {"chat": CHAT | {"prompt": {}}}}, "$.traffic.chat.prompt: give one of fixed"),
        ({"traffic": {"chat": CHAT | {"prompt": None}}}, "$.traffic.chat.prompt: without a trace"),
        (
            {"traffic": {"chat": CHAT | {"trace": "no.jsonl", "rate": 0}}},
            "$.traffic.chat.trace: there is no file",
        ),
        (
            {"traffic": {"chat": CHAT | {"spikes": [{"at": 5, "until": 5, "times": 3}]}}},
            "$.traffic.chat.spikes[0].until: must be after at",
        ),
        (
            {"traffic": {"chat": CHAT | {"output": {"histogram": [[9, 1], [5, 1]]}}}},
            "$.traffic.chat.output.histogram: bins must ascend",
        ),
        ({"failures": [{"at": 1, "slot": 1}]}, "$.failures[0].slot: there are 1 slots"),
        ({"failures": [{"at": 5, "slot": 0, "back_at": 4}]}, "$.failures[0].back_at: must be after at"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenario(**changes)
    assert str(caught.value).startswith("plan: ")
    assert message in str(caught.value)


def test_a_file_that_is_not_there_or_no_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(ScenarioError, match=r"none\.yaml: No such file"):
        load_scenario(path)
    path.write_text("duration: [")
    with pytest.raises(ScenarioError, match=r"none\.yaml"):
        load_scenario(path)


def test_the_same_seed_gives_the_same_requests_whatever_else_is_in_the_scenario() -> None:
    alone = chat()
    beside = arrivals(scenario(traffic={"other": CHAT, "chat": CHAT}), Path())
    assert [a for a in beside if a.traffic == "chat"] == alone
    assert list(arrivals(scenario(seed=1), Path())) != alone


def test_requests_come_at_the_rate_and_from_tenants_by_their_shares() -> None:
    some = chat()
    assert len(some) == pytest.approx(5_000, rel=0.06)
    assert [a.at for a in some] == sorted(a.at for a in some)
    assert sum(a.tenant == "b" for a in some) / len(some) == pytest.approx(0.75, abs=0.03)


def test_spikes_multiply_and_waves_swing_between_their_bounds() -> None:
    some = chat(spikes=[{"at": 20, "until": 40, "times": 3}, {"at": 30, "until": 40, "times": 2}])
    by_decade = [sum(10 * i <= a.at < 10 * i + 10 for a in some) for i in range(10)]
    assert by_decade[2] == pytest.approx(1_500, rel=0.12)
    assert by_decade[3] == pytest.approx(3_000, rel=0.12)
    assert by_decade[5] == pytest.approx(500, rel=0.2)
    wave = chat(waves={"period": 100, "low": 0.1})
    assert sum(45 <= a.at < 55 for a in wave) == pytest.approx(495, rel=0.2)
    assert sum(a.at < 5 or a.at >= 95 for a in wave) == pytest.approx(54, rel=0.6)


def test_spikes_that_follow_one_another_are_drawn_at_the_rate_of_one() -> None:
    spikes = [{"at": at, "until": at + 1, "times": 1_000} for at in (10, 20, 30, 40)]
    some = chat(rate=0.5, spikes=spikes)  # as often as all at a time, it would be 10 ** 13 draws
    assert len(some) == pytest.approx(4 * 500 + 48, rel=0.1)


def test_bursts_come_all_at_once() -> None:
    some = chat(rate=0.0, bursts={"every": 30, "size": 7})
    assert [a.at for a in some] == [30.0] * 7 + [60.0] * 7 + [90.0] * 7


def test_a_trace_is_played_as_it_was_recorded(tmp_path: Path) -> None:
    lines = ['{"at": 0.5, "prompt": 10, "output": 2}', '{"at": 1.5, "prompt": 30, "output": 4}']
    (tmp_path / "t.jsonl").write_text("\n".join([*lines, '{"at": 100.5, "prompt": 1, "output": 1}']))
    plan = PLAN | {"traffic": {"chat": {"model": "m", "tenants": {"a": 1}, "trace": "t.jsonl"}}}
    traced = parse_scenario(msgspec.yaml.encode(plan), "plan", tmp_path)
    some = list(arrivals(traced, tmp_path))
    assert [(a.at, a.num_prompt_tokens, a.num_output_tokens) for a in some] == [(0.5, 10, 2), (1.5, 30, 4)]
    (tmp_path / "t.jsonl").write_text("\n".join(reversed(lines)))
    with pytest.raises(ValueError, match="line 2: at must ascend"):
        list(arrivals(traced, tmp_path))


def test_lengths_follow_their_distribution_within_their_bounds() -> None:
    def drawn(lengths: Lengths) -> list[int]:
        draw = length_sampler(lengths, Random(1))
        return [draw() for _ in range(4_000)]

    assert set(drawn(Lengths(fixed=7))) == {7}
    lognormal = sorted(drawn(Lengths(lognormal=Lognormal(100, 0.8), least=20, most=900)))
    assert lognormal[2_000] == pytest.approx(100, rel=0.1)
    assert (lognormal[0], lognormal[-1]) == (20, 900)
    histogram = drawn(Lengths(histogram=[(10, 1), (100, 3)]))
    assert sum(n <= 10 for n in histogram) / 4_000 == pytest.approx(0.25, abs=0.03)
    assert mean(n for n in histogram if n > 10) == pytest.approx(55, rel=0.05)


def test_prompts_of_one_prefix_share_its_tokens_and_no_others() -> None:
    some = chat(prefixes={"tokens": 200, "count": 4, "zipf": 1.0}, prompt={"fixed": 100})
    prompts = [a.prompt_token_ids(number) for number, a in enumerate(some[:200])]
    assert {len(p) for p in prompts} == {201}  # one token more than the prefix, for the prompt is shorter
    heads = {tuple(p[:200]) for p in prompts}
    assert len(heads) == 4
    assert len({p[-1] for p in prompts}) == 200
    popular = max(sum(tuple(p[:200]) == head for p in prompts) for head in heads)
    assert popular / 200 == pytest.approx(0.48, abs=0.12)
