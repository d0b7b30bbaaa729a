"""The canary against an engine on the simulated runner: what it finds wrong, and what it does not."""

import pytest

from schemas.priority import PriorityClass
from schemas.sampling import TokenLogprobs
from tests.engine_factories import make_engine, make_request
from workers.batch import RunnerOutput, SchedulerOutput
from workers.canary import CANARY_REQUEST_ID, NUM_LEARNED_TOKENS, Canary, CanaryFailedError
from workers.engine import Engine
from workers.request import FinishReason, Request, RequestOutput
from workers.simulated_runner import SimulatedRunner

PROMPT = [1, 2, 3]
RUNNER = SimulatedRunner(vocab_size=1000)
KNOWN = [RUNNER.token_at(CANARY_REQUEST_ID, position) for position in range(NUM_LEARNED_TOKENS)]


class TellingRunner(SimulatedRunner):
    """Tells logprobs: between a token and the runner-up lie `margins[position]`."""

    margins = (5.0,) * 8

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        output = super().execute(batch)
        positions = [len(s.request.output_token_ids) for s in batch.scheduled]
        output.logprobs = [
            TokenLogprobs(-0.1, [token_id, 0], [-0.1, -0.1 - self.margins[position]])
            if token_id is not None
            else None
            for token_id, position in zip(output.token_ids, positions, strict=True)
        ]
        return output


def make(runner: SimulatedRunner = RUNNER) -> Engine:
    engine = make_engine(sharing="shared")
    engine.runner = runner
    return engine


def end(engine: Engine, canary: Canary) -> None:
    while engine.scheduler.has_requests:
        for output in engine.step()[1]:
            canary.on_output(output)


def test_the_first_run_is_compared_with_what_is_known() -> None:
    Canary(PROMPT, KNOWN).first_run(make())
    with pytest.raises(CanaryFailedError, match="right are"):
        Canary(PROMPT, [*KNOWN[:-1], KNOWN[-1] + 1]).first_run(make())


def test_what_is_not_known_is_learned_as_far_as_it_is_no_near_tie() -> None:
    canary = Canary(PROMPT)
    canary.first_run(make(TellingRunner(vocab_size=1000)))
    assert canary.known == KNOWN

    class Torn(TellingRunner):
        margins = (5.0, 5.0, 5.0, 0.1, 5.0, 5.0, 5.0, 5.0)

    canary = Canary(PROMPT)
    canary.first_run(make(Torn(vocab_size=1000)))
    assert canary.known == KNOWN[:3]
    assert canary.next_run() is not None

    class Lost(TellingRunner):
        margins = (0.1,) * 8

    canary = Canary(PROMPT)
    canary.first_run(make(Lost(vocab_size=1000)))
    assert canary.known == []
    assert canary.next_run() is None


def test_an_engine_that_cannot_run_it_does_not_pass() -> None:
    with pytest.raises(CanaryFailedError, match="context"):
        Canary([1] * 5000, KNOWN).first_run(make())


def test_runs_follow_one_another_and_never_overlap() -> None:
    engine, canary = make(), Canary(PROMPT, KNOWN)
    canary.first_run(engine)
    for _ in range(3):
        request = canary.next_run()
        assert request is not None
        assert canary.next_run() is None
        engine.add_request(request)
        end(engine, canary)


def test_the_first_wrong_token_is_enough() -> None:
    canary = Canary(PROMPT, KNOWN)
    request = canary.next_run()
    assert request is not None
    canary.on_output(RequestOutput(request, 0, KNOWN[:2]))
    with pytest.raises(CanaryFailedError):
        canary.on_output(RequestOutput(request, 2, [KNOWN[2] + 1]))


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.SUPERSEDED, FinishReason.CANCELLED])
def test_a_run_that_ends_early_says_nothing_and_another_follows(reason: FinishReason) -> None:
    canary = Canary(PROMPT, KNOWN)
    request = canary.next_run()
    assert request is not None
    canary.on_output(RequestOutput(request, 0, KNOWN[:2]))
    canary.on_output(RequestOutput(request, 2, [], reason))
    engine, again = make(), canary.next_run()
    assert again is not None
    engine.add_request(again)
    end(engine, canary)


def test_outputs_of_others_are_passed_over() -> None:
    canary = Canary(PROMPT, KNOWN)
    mine = canary.next_run()
    assert mine is not None
    other = Request(
        CANARY_REQUEST_ID, 1, mine.priority, PROMPT, mine.sampling, reply_partition=3, output_token_ids=[]
    )
    canary.on_output(RequestOutput(other, 0, [KNOWN[0] + 1], FinishReason.STOP))
    assert canary.next_run() is None


def test_nobody_gives_up_a_seat_for_it_and_it_takes_none() -> None:
    engine, canary = make_engine(max_num_seqs=2), Canary(PROMPT, KNOWN)
    engine.runner = RUNNER
    running = [make_request(n, priority=PriorityClass.BATCH, max_tokens=50) for n in (1, 2)]
    for each in running:
        engine.add_request(each)
    engine.step()
    request = canary.next_run()
    assert request is not None
    engine.add_request(request)
    batch, outputs = engine.step()
    assert batch.admitted == [request]
    assert not batch.preempted
    assert len(batch.scheduled) == 3
    # While it runs the seats are two as before: one victim is enough for one of a higher class.
    higher = make_request(3, prompt_len=5)
    engine.add_request(higher)
    batch, more = engine.step()
    assert [each.victim for each in batch.preempted] == [running[1]]
    assert engine.scheduler.num_running == 3
    for output in outputs + more:
        canary.on_output(output)
    end(engine, canary)
    assert not engine.scheduler.running.num_seats


def test_it_never_finds_itself_in_the_prefix_cache() -> None:
    engine, canary = make(), Canary(PROMPT, KNOWN)
    canary.first_run(engine)
    request = canary.next_run()
    assert request is not None
    engine.add_request(request)
    batch, _ = engine.step()
    assert batch.total_num_scheduled_tokens == len(PROMPT)
    assert request.num_cached_tokens == 0
