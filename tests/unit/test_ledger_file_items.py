"""Items of jobs in the shard's owner: held until they are committed, stopped with their job."""

import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.records import Left, Retry
from streams.ledger.batch import STOP_MS
from streams.ledger.batch_actions import CancelRun, FileAnswer
from streams.ledger.batch_item import BatchItem, FileSource, make_item
from streams.ledger.batch_outcome import CANCELLED
from streams.ledger.file_lines import item_request_id
from tests.batch_world import MODELS, WORKER, World, completion, dispatched, rejected, tokens

JOB = "batch_" + "0" * 32
WINDOW_MS = 3_600_000


def make_file_item(index: int = 0, batch_id: str = JOB, max_tokens: int = 4) -> BatchItem:
    source = FileSource("demo", batch_id, index, f"n{index}")
    body = {"model": "simulated", "prompt": "hi", "max_tokens": max_tokens}
    rid = item_request_id(batch_id, index)
    return make_item(source, rid, 0, "/v1/generate", body, MODELS, None, WINDOW_MS)


def line_of(answer: FileAnswer) -> Any:
    assert answer.line.endswith(b"\n")
    return json.loads(answer.line)


def ended(world: World) -> tuple[FileAnswer, Any]:
    (answer,) = world.shard.answers.file
    assert world.shard.open == 0
    return answer, line_of(answer)


def test_an_answer_holds_its_place_in_the_log_until_it_is_committed() -> None:
    world = World()
    item = make_file_item()
    world.accept(item)
    assert (world.last.end_ms, world.last.accepted_at) == (WINDOW_MS, 0)
    world.say(dispatched(world.last), tokens(world.last, 0, "abcd"), completion(world.last, 4))
    answer, line = ended(world)
    assert line["response"]["body"]["text"] == "abcd"
    assert (answer.code, answer.input_tokens, answer.output_tokens) == (None, 3, 4)
    assert world.shard.resume_offset == 0
    # Not committed, the owner dies: the next one has the answer from the log.
    second = World(world.log, world.shard.resume_offset, world.epoch + 1)
    second.accept(item)
    assert ended(second)[0] == answer
    assert not second.requests
    second.shard.answers.release([item.request_id])
    assert second.shard.resume_offset == len(second.log)


def test_what_an_earlier_life_began_holds_its_place_too() -> None:
    first = World()
    first.accept(make_file_item())
    first.say(dispatched(first.last))
    second = World(first.log, 0, first.epoch + 1)
    assert make_file_item().request_id in second.shard.recovery
    assert second.shard.resume_offset == 0


@pytest.mark.parametrize("bound", [False, True])
def test_a_cancel_reaches_the_queue_while_no_run_is_bound(bound: bool) -> None:
    world = World()
    world.accept(make_file_item())
    world.accept(make_file_item(1, batch_id="batch_other"))
    request = world.requests[0]
    if bound:
        world.say(dispatched(request), tokens(request, 0, "ab"))
    (cancel,) = world.shard.cancel(JOB, CANCELLED, world.now)
    assert isinstance(cancel, CancelRun)
    world.do([cancel])
    assert (world.cancelled[0].request_id, world.cancelled[0].attempt) == (request.request_id, 1)
    assert cancel.behind_request is not bound
    assert not world.shard.cancel(JOB, CANCELLED, world.now)
    if bound:
        world.say(completion(request, 2, "cancelled"))
    else:
        world.say(rejected(request, 499, "cancelled"))
    (answer,) = world.shard.answers.file
    assert (answer.code, answer.seals) == ("batch_cancelled", [])
    assert answer.output_tokens == (2 if bound else 0)
    line = line_of(answer)
    assert line["response"] is None
    assert line["error"]["code"] == "batch_cancelled"
    assert world.shard.open == 1


def test_an_answer_that_comes_first_is_delivered() -> None:
    world = World()
    world.accept(make_file_item())
    world.say(dispatched(world.last))
    world.do(world.shard.cancel(JOB, CANCELLED, world.now))
    world.say(tokens(world.last, 0, "abcd"), completion(world.last, 4))
    assert ended(world)[0].code is None


@pytest.mark.parametrize("status", [429, 503])
def test_what_waits_to_be_sent_again_ends_at_once(status: int) -> None:
    world = World()
    world.accept(make_file_item())
    world.say(rejected(world.last, status))
    world.do(world.shard.cancel(JOB, CANCELLED, world.now))
    world.read_back()
    answer = ended(world)[0]
    assert (answer.code, answer.seals) == ("batch_cancelled", [])
    # What was sent before was taken after all.
    world.say(dispatched(world.last))
    assert [(seal.input_tokens, seal.output_tokens) for seal in world.seals] == [(0, 0)]


def test_a_second_run_behind_the_cancelled_one_changes_nothing_of_the_bill() -> None:
    world = World()
    world.accept(make_file_item())
    request = world.last
    world.say(dispatched(request), tokens(request, 0, "ab"))
    world.do(world.shard.cancel(JOB, CANCELLED, world.now))
    world.say(replace(completion(request, 2, "cancelled"), cached_tokens=1))
    answer = ended(world)[0]
    assert (answer.seals, answer.cached_tokens, answer.output_tokens) == ([], 1, 2)
    world.say(tokens(request, 0, "abcd", epoch=99))
    (seal,) = world.seals
    assert (seal.sealed, seal.input_tokens, seal.cached_tokens, seal.output_tokens) == (True, 3, 1, 2)


def test_a_worker_lost_after_the_cancel_is_not_replaced_and_billed_for_what_came() -> None:
    world = World()
    world.accept(make_file_item())
    world.say(dispatched(world.last), tokens(world.last, 0, "ab"))
    world.do(world.shard.cancel(JOB, CANCELLED, world.now))
    world.fleet.on_event(Left("worker", 0, WORKER, "killed"), WORKER + 1)
    world.tick(STOP_MS)
    answer, _ = ended(world)
    assert len(world.requests) == 1
    assert not any(isinstance(record, Retry) for record in world.log)
    (seal,) = answer.seals
    assert (seal.sealed, seal.output_tokens, seal.finish_reason) == (
        True, 2, "cancelled",
    )  # fmt: skip
    assert (answer.input_tokens, answer.output_tokens) == (3, 2)


def test_a_gap_or_a_retry_after_the_cancel_ends_it() -> None:
    world = World()
    world.accept(make_file_item())
    world.say(dispatched(world.last))
    world.do(world.shard.cancel(JOB, CANCELLED, world.now))
    world.say(tokens(world.last, 2, "c"))
    assert ended(world)[0].code == "batch_cancelled"


def test_refusals_of_its_body_are_responses_and_failures_are_errors() -> None:
    world = World()
    world.accept(make_file_item())
    world.say(rejected(world.last, 400, "tokens_per_minute_exceeded"))
    answer, line = ended(world)
    assert (answer.code, line["response"]["status_code"]) == ("tokens_per_minute_exceeded", 400)
    assert line["error"] is None


def test_a_job_that_expires_while_its_items_wait_in_admission() -> None:
    world = World()
    world.accept(make_file_item())
    world.say(rejected(world.last, 503, "expired"))
    answer, line = ended(world)
    assert answer.code == line["error"]["code"] == "batch_expired"
