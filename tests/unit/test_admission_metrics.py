"""What admission's /metrics say of the load."""

from prometheus_client import generate_latest

from streams.admission.actions import Announce
from streams.admission.load_figures import LoadFigures
from streams.admission.metrics import Metrics
from streams.admission.overload import Outcome
from streams.admission.shedding import ShedLevel
from tests.unit.test_admission_decisions import Driver


def values(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_the_load_of_each_model() -> None:
    driver, metrics = Driver(), Metrics()
    metrics.registry.register(LoadFigures(driver.admission.overload))
    driver.heartbeat(num_blocks=100, free_blocks=25, num_gpus=2)
    driver.tick()
    request = driver.request()
    driver.send(request)
    driver.usage(request, output=4, first_token_ms=20)
    figures = {"num_blocks": 100, "free_blocks": 5, "max_num_seqs": 1, "num_running": 1, "num_gpus": 4}
    driver.heartbeat(**figures, mailbox_offsets=[1, 0, 0])
    driver.send(driver.request())
    for _ in range(5):
        driver.tick(100)
    driver.admission.overload.shed[ShedLevel.FAIR_SHARE] += 2
    found = values(metrics)
    assert found['headrace_admission_shed_level{model="simulated"}'] == ShedLevel.PAUSE_BATCH
    assert found['headrace_admission_kv_use{model="simulated"}'] == 0.95
    assert found['headrace_admission_drain_tokens_per_second{class="interactive",model="simulated"}'] > 0
    assert found['headrace_admission_shed_requests_total{level="fair_share"}'] == 2
    assert found['headrace_admission_shed_requests_total{level="cap_free"}'] == 0
    assert found['headrace_admission_served_tokens_total{model="simulated"}'] == 14
    assert found['headrace_admission_gpu_seconds_total{model="simulated"}'] == 0.1 * 2 + 0.4 * 4


def test_predicted_first_tokens_stand_beside_real_ones() -> None:
    driver, metrics = Driver(), Metrics()
    outcomes = driver.admission.overload.outcomes
    outcomes += [Outcome(0, 100.0, 400.0), Outcome(1, 50.0, 20.0)]
    metrics.first_tokens(outcomes)
    assert not outcomes
    found = values(metrics)
    assert found['headrace_admission_first_token_seconds_sum{class="interactive"}'] == 0.4
    assert found['headrace_admission_predicted_first_token_seconds_sum{class="interactive"}'] == 0.1
    name = "headrace_admission_first_token_error_seconds_bucket"
    assert found[f'{name}{{class="interactive",le="-0.25"}}'] == 1
    assert (found[f'{name}{{class="free",le="0.025"}}'], found[f'{name}{{class="free",le="0.1"}}']) == (0, 1)


def test_every_level_is_a_figure_an_event_and_a_record_though_no_class_free_is_there() -> None:
    driver, metrics = Driver(), Metrics()
    metrics.registry.register(LoadFigures(driver.admission.overload))
    driver.heartbeat(max_num_seqs=1, num_running=1)
    driver.send(driver.request(start_ms=60_000))
    seen: list[tuple[ShedLevel, float]] = []

    def watch(most_ms: int) -> None:
        for _ in range(most_ms // 100):
            driver.now += 100
            for action in driver.admission.tick(driver.now):
                if isinstance(action, Announce):
                    figure = values(metrics)['headrace_admission_shed_level{model="simulated"}']
                    seen.append((action.change.level, figure))

    watch(7_000)
    up = [ShedLevel.PAUSE_BATCH, ShedLevel.CAP_FREE, ShedLevel.FAIR_SHARE, ShedLevel.REFUSE_FREE]
    assert seen == [(level, float(level)) for level in up]
    # It is the interactive class that waits, within its share: nobody is refused for it.
    assert driver.rejections() == []
    seen.clear()
    driver.heartbeat()
    watch(15_000)
    down = [*reversed(up[:-1]), ShedLevel.NONE]
    assert seen == [(level, float(level)) for level in down]
    records = [d for d in driver.admission.decisions.drain() if d.action == "shed"]
    assert [record.reason for record in records] == [level.label for level in [*up, *down]]
