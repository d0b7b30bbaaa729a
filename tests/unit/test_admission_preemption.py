"""A worker that lower classes fill has room for a higher one: they give way in its next step."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from infra.simulator.scenario import Scenario, step_costs
from infra.simulator.simulation import Simulation
from schemas.fleet import Member
from schemas.priority import PriorityClass
from schemas.records import ClassLoad, Heartbeat
from streams.admission.router import Blocked, Router
from streams.admission.shares import Share
from streams.admission.worker import Worker
from tests.admission_harness import make_request, make_status
from workers.roofline import StepLoad

INTERACTIVE, FREE, BATCH = PriorityClass
NONE = ClassLoad(0, 0, 0)


def status(**fields: Any) -> dict[str, Any]:
    """8 of 8 sequences run, all in class free, on 800 of 1,000 blocks."""
    full = {"num_running": 8, "free_blocks": 200, "by_class": [NONE, ClassLoad(8, 800, 8), NONE]}
    return {**full, **fields}


def router(*workers: dict[str, Any]) -> Router:
    found = Router()
    found.update(
        Member("worker", slot, 10, 0, Heartbeat("worker", slot, 10, b"", worker=make_status(**each)))
        for slot, each in enumerate(workers)
    )
    return found


def chosen(found: Router, expected: int = 16, share: Share | None = None, **request: Any) -> int | Blocked:
    worker = found.choose(make_request(**request), expected, share=share)
    return worker.slot if isinstance(worker, Worker) else worker


def dispatch(found: Router, expected: int = 16, **request: Any) -> None:
    made = make_request(**request)
    worker = found.choose(made, expected)
    assert isinstance(worker, Worker)
    found.dispatch(worker, made, expected)


@pytest.mark.parametrize(
    ("fields", "priority", "taken"),
    [
        ({}, INTERACTIVE, True),
        ({}, FREE, False),
        ({}, BATCH, False),
        ({"by_class": [NONE, NONE, ClassLoad(8, 800, 8)]}, FREE, True),
        ({"by_class": [ClassLoad(8, 800, 8), NONE, NONE]}, INTERACTIVE, False),
        ({"by_class": [ClassLoad(7, 700, 7), ClassLoad(1, 100, 1), NONE]}, INTERACTIVE, True),
        ({"by_class": []}, INTERACTIVE, False),  # it does not say
        # Who gave way waits there, and is in nobody's way.
        ({"num_waiting": [0, 5, 0], "by_class": [NONE, ClassLoad(8, 800, 9_000), NONE]}, INTERACTIVE, True),
        (
            {"num_waiting": [1, 0, 0], "by_class": [ClassLoad(7, 7, 7), ClassLoad(1, 9, 1), NONE]},
            INTERACTIVE,
            False,
        ),
    ],
)
def test_lower_classes_are_room(fields: dict[str, Any], priority: PriorityClass, taken: bool) -> None:
    assert (chosen(router(status(**fields)), priority=priority) == 0) == taken


def test_blocks_of_lower_classes_are_room_and_those_of_others_are_not() -> None:
    few = {"num_running": 2, "free_blocks": 10}
    assert chosen(router(status(**few, by_class=[NONE, ClassLoad(2, 100, 2), NONE])), 16 * 100) == 0
    mixed = [ClassLoad(1, 60, 1), ClassLoad(1, 40, 1), NONE]
    assert chosen(router(status(**few, by_class=mixed)), 16 * 40) == 0
    assert chosen(router(status(**few, by_class=mixed)), 16 * 60) is Blocked.NO_ROOM


def test_where_something_is_free_nobody_gives_way() -> None:
    last_seat = {"num_running": 7, "free_blocks": 10, "by_class": [ClassLoad(7, 990, 7), NONE, NONE]}
    assert chosen(router(status(), last_seat), 10) == 1
    assert chosen(router(status(), last_seat), 200) == 0  # the last seat has no blocks for it


def test_a_worker_is_full_again_when_its_seats_are_the_classs_own() -> None:
    found = router(status(prefill_tokens_per_s=1e6))
    for _ in range(8):
        dispatch(found)
    assert chosen(found) is Blocked.NO_ROOM


def test_what_ended_since_the_heartbeat_gives_way_no_more() -> None:
    found = router(status(num_running=1, free_blocks=0, by_class=[NONE, ClassLoad(1, 900, 1), NONE]))
    found.ended(0, 10, FREE, 900 * 16)
    assert chosen(found, 16 * 899 - 10) == 0
    assert chosen(found, 16 * 901) is Blocked.NO_ROOM


def test_processes_share_what_lower_classes_give() -> None:
    found = router(status(prefill_tokens_per_s=1e6))
    half = Share(below=0, own=1, total=2)
    for _ in range(4):
        assert chosen(found, share=half) == 0
        dispatch(found)
    seats = half.of(8, 0, 0)
    assert seats in (4, 5)
    for _ in range(seats - 4):
        dispatch(found)
    assert chosen(found, share=half) is Blocked.NO_ROOM


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    seats=st.integers(1, 24),
    memory_share=st.sampled_from([0.105, 0.11, 0.9]),
    lower=st.sampled_from(["free", "batch"]),
    prompt=st.integers(1, 1_500),
    output=st.integers(1, 60),
    swap_memory_mib=st.sampled_from([0, 256]),
)
def test_nobody_waits_behind_a_lower_class_for_longer_than_a_step(
    seats: int, memory_share: float, lower: str, prompt: int, output: int, swap_memory_mib: int
) -> None:
    """One interactive request now and then, at a worker that the lower class has filled with long answers:
    from its arrival to its first token it is the hops, one step, and the steps of its own prompt."""
    plan: dict[str, Any] = {
        "duration": 2.4,
        "models": {"m": {"shape": "8b", "max_model_len": 4_096}},
        "fleet": [
            {
                "model": "m",
                "gpu": "h100",
                "memory_share": memory_share,
                "max_num_seqs": seats,
                "swap_memory_mib": swap_memory_mib,
            }
        ],
        "tenants": {"low": {}, "high": {}},
        "traffic": {
            "high": {
                "model": "m",
                "tenants": {"high": 1},
                "bursts": {"every": 0.7, "size": 1},
                "prompt": {"fixed": prompt},
                "output": {"fixed": output},
            },
        },
        "policy": {"shed_wait_ms": "100000,200000,300000,400000"},
    }
    much = {"model": "m", "prompt": {"fixed": 200}, "output": {"fixed": 600}}
    if lower == "batch":
        plan["backlogs"] = {"low": {**much, "tenant": "low", "requests": 500, "window": 60}}
    else:
        plan["traffic"]["low"] = {**much, "tenants": {"low": 1}, "rate": 30.0, "priority": "free"}
    scenario = msgspec.convert(plan, Scenario)
    measures = Simulation(scenario, Path()).run()
    gpu = step_costs(scenario.models["m"], scenario.fleet[0])
    step_s = gpu.step_seconds(StepLoad(512, seats, seats * 800 + prompt, 512 * 1_500))
    # Who gives way may be copied out first: as many blocks as the prompt needs, and one more victim's.
    swap_s = gpu.swap_seconds(-(-prompt // 16) + 50)
    num_chunks = -(-prompt // (512 - seats))
    for flight in measures.flights:
        if flight.arrival.traffic == "high":
            assert flight.first_token_at is not None
            ttft_s = flight.first_token_at - flight.arrival.at
            assert ttft_s <= 2 * 0.003 + (1 + num_chunks) * step_s + swap_s
