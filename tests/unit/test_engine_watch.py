import pytest

from workers.canary import Canary
from workers.engine_watch import EngineStalledError, EngineWatch
from workers.request import FinishReason, Request, RequestOutput


class Engine:
    """An engine thread as far as it is watched."""

    def __init__(self) -> None:
        self.age = 0.0
        self.added: list[Request] = []

    def step_age(self, now: float) -> float:
        return self.age


def watch(engine: Engine, canary: Canary | None) -> EngineWatch:
    return EngineWatch(canary, engine.step_age, engine.added.append, stall_s=10, stall_exit_s=60)


def test_says_how_the_engine_is() -> None:
    engine = Engine()
    assert watch(engine, None).status(0.0) == "unknown"
    assert watch(engine, Canary([1], [])).status(0.0) == "unknown"
    fit = watch(engine, Canary([1], [2]))
    assert (fit.status(0.0), fit.why_not_ready(0.0)) == ("ok", "")
    engine.age = 10.1
    assert (fit.status(0.0), fit.why_not_ready(0.0)) == ("engine_stalled", "engine_stalled")
    fit.check(0.0)
    engine.age = 0.0
    assert fit.status(0.0) == "ok"
    fit.failed = True
    assert (fit.status(0.0), fit.why_not_ready(0.0)) == ("failed", "failed")


def test_gives_up_on_a_step_that_does_not_end() -> None:
    engine = Engine()
    engine.age = 60.5
    with pytest.raises(EngineStalledError, match="60 s"):
        watch(engine, None).check(0.0)


def test_one_canary_at_a_time() -> None:
    engine = Engine()
    fit = watch(engine, Canary([1], [2]))
    fit.start_canary()
    fit.start_canary()
    assert len(engine.added) == 1
    watch(engine, None).start_canary()
    assert len(engine.added) == 1


def test_says_how_many_canaries_began_and_which_passed() -> None:
    engine = Engine()
    assert watch(engine, None).canaries_begun == watch(engine, Canary([1], [])).canaries_begun == -1
    fit = watch(engine, Canary([1], [2]))
    assert (fit.canaries_begun, fit.canary_passed) == (0, 0)
    for number, (reason, passed) in enumerate(
        [(FinishReason.LENGTH, 1), (FinishReason.CANCELLED, 1), (FinishReason.LENGTH, 3)], 1
    ):
        fit.start_canary()
        fit.start_canary()
        assert fit.canaries_begun == number
        token_ids = [2] if reason is FinishReason.LENGTH else []
        fit.on_output(RequestOutput(engine.added[-1], 0, token_ids, reason))
        assert fit.canary_passed == passed  # one that ends early says nothing
