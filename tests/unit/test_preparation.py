import asyncio
from typing import Any

import pytest

from schemas.records import Dispatch
from schemas.sampling import Grammar
from schemas.tokenization import Tokenizer
from tests.worker_harness import make_inference_request
from workers.live_requests import End, LiveRequest, LiveRequests
from workers.preparation import Preparation
from workers.request import FinishReason, Request
from workers.text_rules import TextRules

RULES = TextRules(Tokenizer.simulated(), 258, [257])
ID = b"r" * 16


class Stage:
    def __init__(self, rules: TextRules = RULES) -> None:
        self.added: list[Request] = []
        self.ended: list[tuple[Request, End]] = []
        self.preparation = Preparation(
            rules, self.added.append, lambda live, end: self.ended.append((live.request, end))
        )
        self._live = LiveRequests(0, 1, "simulated", 258)

    def start(self, attempt: int = 1, **sampling: Any) -> LiveRequest:
        wanted = make_inference_request(request_id=ID, attempt=attempt)
        for name, value in sampling.items():
            setattr(wanted.sampling, name, value)
        taken = self._live.on_dispatch(Dispatch(0, 1, 5, wanted), 0.0)
        assert taken is not None
        self.preparation.start(taken[0])
        return taken[0]

    async def until_told(self, count: int = 1) -> None:
        async with asyncio.timeout(10):
            while len(self.added) + len(self.ended) < count:  # noqa: ASYNC110  # two lists would set it
                await asyncio.sleep(0.001)


async def test_what_has_no_grammar_is_passed_on_at_once() -> None:
    stage = Stage()
    live = stage.start(stop=["x"])
    assert stage.added == [live.request]
    assert live.request.stop_checker is not None


async def test_a_long_resumed_output_is_searched_aside() -> None:
    stage = Stage()
    wanted = make_inference_request(request_id=ID, attempt=2)
    wanted.sampling.stop, wanted.sampling.max_tokens = ["xyx"], 2000
    wanted.output_token_ids = list(b"xy" + b"a" * 900 + b"xyx")
    taken = LiveRequests(0, 1, "simulated", 258).on_dispatch(Dispatch(0, 1, 5, wanted), 0.0)
    assert taken is not None
    stage.preparation.start(taken[0])
    assert stage.ended == []
    await stage.until_told()
    assert stage.ended[0][1] == End(FinishReason.STOP, text_length=902)


async def test_a_grammar_is_compiled_aside_and_then_the_request_runs() -> None:
    stage = Stage()
    live = stage.start(grammar=Grammar("regex", "a+"), stop=["aaa"])
    assert stage.added == []
    await stage.until_told()
    assert stage.added == [live.request]
    assert live.request.constraint is not None
    assert live.request.stop_checker is not None


async def test_a_bad_grammar_ends_its_request_alone() -> None:
    stage = Stage()
    bad = stage.start(grammar=Grammar("regex", "("))
    await stage.until_told()
    ((ended, end),) = stage.ended
    assert ended is bad.request
    assert end.reason is FinishReason.ERROR
    good = stage.start(attempt=2, grammar=Grammar("regex", "a"))
    await stage.until_told(2)
    assert stage.added == [good.request]


async def test_a_cancel_finds_a_request_whose_grammar_is_being_compiled() -> None:
    stage = Stage()
    live = stage.start(attempt=2, grammar=Grammar("regex", "a"))
    stage.preparation.cancel(ID, 1)
    assert stage.ended == []
    stage.preparation.cancel(ID, 2)
    assert stage.ended == [(live.request, End(FinishReason.CANCELLED))]
    await asyncio.sleep(0.05)
    assert stage.added == []


async def test_a_higher_attempt_takes_the_place_of_one_that_is_being_compiled() -> None:
    stage = Stage()
    stage.start(attempt=1, grammar=Grammar("regex", "a"))
    higher = stage.start(attempt=2, grammar=Grammar("regex", "a"))
    await stage.until_told()
    await asyncio.sleep(0.05)
    assert (stage.added, stage.ended) == ([higher.request], [])


async def test_a_failure_of_the_library_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TextRules):
        def apply(self, request: Request) -> End | None:
            raise BaseException("panic")

    stage = Stage(Broken(Tokenizer.simulated(), 258, [257]))
    stage.start(grammar=Grammar("regex", "a"))
    await stage.until_told()
    assert stage.ended[0][1] == End(FinishReason.ERROR, "grammar: the grammar library failed: BaseException")
    assert "could not be compiled" in caplog.text


async def test_closing_leaves_nothing_behind() -> None:
    stage = Stage()
    stage.start(grammar=Grammar("regex", "a"))
    stage.preparation.close()
    await asyncio.sleep(0.05)
    assert (stage.added, stage.ended) == ([], [])
