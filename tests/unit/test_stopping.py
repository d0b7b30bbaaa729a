"""End tokens, lengths, and what is held back because its text may become a stop string."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from schemas.sampling import TokenLogprobs
from tests.engine_factories import EOS, make_request, make_scheduler
from workers.batch import RunnerOutput
from workers.request import FinishReason, Request, RequestOutput
from workers.scheduler import Scheduler


@dataclass
class Pattern:
    """A stop checker whose stop string is a sequence of tokens; a token is one character."""

    stop: list[int]
    seen: list[int] = field(default_factory=list)
    num_held: int = 0

    def push(self, token_id: int) -> int | None:
        self.seen.append(token_id)
        stop = self.stop
        self.num_held = max(n for n in range(len(stop)) if n == 0 or self.seen[-n:] == stop[:n])
        return len(self.seen) - len(stop) if self.seen[-len(stop) :] == stop else None


@dataclass
class Recorder:
    """A constraint that allows all, up to a token that it cannot go on from."""

    impossible: int = -1
    error: str = ""
    taken: list[int] = field(default_factory=list)

    def fill_bitmask(self, row: npt.NDArray[np.int32]) -> None:
        row[:] = -1

    def advance(self, token_id: int) -> None:
        self.taken.append(token_id)
        if token_id == self.impossible:
            self.error = "grammar: too hard"


def feed(scheduler: Scheduler, *token_ids: int, logprobs: bool = False) -> list[RequestOutput]:
    """Outputs of one step for each token; the one running request gets them."""
    outputs = []
    for token_id in token_ids:
        batch = scheduler.schedule()
        told: list[TokenLogprobs | None] = [TokenLogprobs(-float(token_id), [], [])] if logprobs else []
        outputs += scheduler.update_from_output(batch, RunnerOutput([token_id], told))
    return outputs


def start(stop: list[int] | None = None, **fields: object) -> tuple[Scheduler, Request]:
    scheduler = make_scheduler()
    request = make_request(**fields)  # type: ignore[arg-type]
    if stop is not None:
        request.stop_checker = Pattern(stop)
    scheduler.add_request(request)
    return scheduler, request


def told(outputs: list[RequestOutput]) -> list[tuple[int, list[int]]]:
    return [(o.position, o.token_ids) for o in outputs]


def test_tokens_are_held_back_until_they_cannot_become_a_stop_string() -> None:
    scheduler, request = start([3, 4, 5], max_tokens=20)
    assert told(feed(scheduler, 9, 3)) == [(0, [9])]
    assert request.num_held_tokens == 1
    assert told(feed(scheduler, 4)) == []
    assert told(feed(scheduler, 3)) == [(1, [3, 4])]
    assert told(feed(scheduler, 8)) == [(3, [3, 8])]
    assert request.num_held_tokens == 0


def test_a_stop_string_ends_the_request_and_says_where_the_text_is_cut() -> None:
    scheduler, request = start([3, 4], max_tokens=20)
    outputs = feed(scheduler, 9, 3, 4)
    assert told(outputs) == [(0, [9]), (1, [3, 4])]
    assert (outputs[-1].finish_reason, outputs[-1].text_length) == (FinishReason.STOP, 1)
    assert request.finish_reason is FinishReason.STOP
    assert request.num_held_tokens == 0
    assert not scheduler.has_requests


@pytest.mark.parametrize(("last", "reason"), [(EOS, FinishReason.STOP), (3, FinishReason.LENGTH)])
def test_a_normal_end_tells_what_was_held(last: int, reason: FinishReason) -> None:
    scheduler, _ = start([3, 3, 4], max_tokens=3)
    outputs = feed(scheduler, 9, 3, last)
    assert told(outputs) == [(0, [9]), (1, [3, last])]
    assert (outputs[-1].finish_reason, outputs[-1].text_length) == (reason, None)


def test_an_abort_drops_what_was_held() -> None:
    scheduler, request = start([3, 4], max_tokens=20)
    feed(scheduler, 9, 3)
    output = scheduler.abort(request.request_id, 1)
    assert output is not None
    assert (output.position, output.token_ids) == (1, [])


def test_a_request_that_holds_tokens_survives_preemption() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    request = make_request(1, max_tokens=20, priority=2)  # type: ignore[arg-type]
    request.stop_checker = Pattern([3, 4, 5])
    scheduler.add_request(request)
    feed(scheduler, 9, 3)
    scheduler.add_request(make_request(2, max_tokens=1))
    feed(scheduler, 8)
    assert request.num_preemptions == 1
    assert told(feed(scheduler, 4, 6)) == [(1, [3, 4, 6])]


def test_logprobs_go_with_their_tokens_also_when_these_are_held() -> None:
    scheduler, _ = start([3, 4, 5], max_tokens=20)
    outputs = feed(scheduler, 9, 3, 4, 6, 7, logprobs=True)
    assert told(outputs) == [(0, [9]), (1, [3, 4, 6]), (4, [7])]
    assert [[p.logprob for p in o.logprobs] for o in outputs] == [[-9.0], [-3.0, -4.0, -6.0], [-7.0]]


def test_logprobs_of_some_of_a_batch() -> None:
    scheduler = make_scheduler()
    for number in (1, 2):
        scheduler.add_request(make_request(number))
    asked = TokenLogprobs(-0.5, [7], [-0.5])
    outputs = scheduler.update_from_output(scheduler.schedule(), RunnerOutput([7, 8], [None, asked]))
    assert [o.logprobs for o in outputs] == [[], [asked]]


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_end_and_stop_tokens_do_not_count_among_the_first_min_tokens(min_tokens: int) -> None:
    for end in (EOS, 9):
        scheduler, request = start(max_tokens=20, min_tokens=min_tokens, stop_token_ids=[9])
        while scheduler.has_requests:
            feed(scheduler, end)
        assert len(request.output_token_ids) == min_tokens + 1


def test_a_resumed_request_with_an_early_end_token_goes_on() -> None:
    scheduler, request = start(max_tokens=20, min_tokens=4, output_token_ids=[5, EOS])
    assert told(feed(scheduler, 7, 7, EOS)) == [(2, [7]), (3, [7]), (4, [EOS])]
    assert request.finish_reason is FinishReason.STOP


def test_what_an_earlier_attempt_told_is_not_told_again() -> None:
    scheduler = make_scheduler()
    request = make_request(max_tokens=20, attempt=2, output_token_ids=[9, 3])
    request.stop_checker = checker = Pattern([3, 4, 5])
    for token_id in request.output_token_ids:
        checker.push(token_id)
    assert checker.num_held == 1
    scheduler.add_request(request)
    assert told(feed(scheduler, 4)) == []
    assert request.num_held_tokens == 1
    assert told(feed(scheduler, 8)) == [(2, [4, 8])]


def test_a_grammar_that_cannot_be_gone_on_with_ends_its_request_alone() -> None:
    scheduler, request = start([3, 4], max_tokens=20)
    other = make_request(2, max_tokens=20)
    scheduler.add_request(other)
    request.constraint = Recorder(impossible=6)
    feed_all = [RunnerOutput([9, 9]), RunnerOutput([3, 9]), RunnerOutput([6, 9])]
    outputs = [o for sampled in feed_all for o in scheduler.update_from_output(scheduler.schedule(), sampled)]
    last = next(o for o in outputs if o.finish_reason)
    assert (last.request, last.finish_reason, last.error) == (
        request,
        FinishReason.ERROR,
        "grammar: too hard",
    )
    # The token is void, and what was held is not told either.
    assert (last.position, last.token_ids) == (1, [])
    assert list(scheduler.running) == [other]


def test_a_constraint_takes_every_token_in_order() -> None:
    scheduler, request = start(max_tokens=3)
    request.constraint = recorder = Recorder()
    feed(scheduler, 5, 6, 7)
    assert recorder.taken == [5, 6, 7]
