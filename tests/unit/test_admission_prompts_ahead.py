"""Prompts wait at admission, not behind others at a worker; batch leaves places in the batch."""

from typing import Any

import pytest

from schemas.fleet import Member
from schemas.records import Heartbeat
from streams.admission.router import Router
from streams.admission.worker import Worker
from tests.admission_harness import MODEL, make_request, make_status

BATCH = 2
# 150 ms of it are 3,000 tokens.
FAST = {"max_num_seqs": 64, "num_blocks": 10_000, "free_blocks": 10_000, "prefill_tokens_per_s": 20_000.0}


def router(**status: Any) -> Router:
    found = Router()
    heartbeat = Heartbeat("worker", 0, 10, b"", worker=make_status(**FAST | status))
    found.update([Member("worker", 0, 10, 0, heartbeat)])
    return found


def takes(found: Router, num_prompt_tokens: int = 100, **request: Any) -> bool:
    prompt = list(range(num_prompt_tokens))
    return isinstance(found.choose(make_request(prompt_token_ids=prompt, **request), 16), Worker)


@pytest.mark.parametrize(
    ("status", "num_prompt_tokens", "taken"),
    [
        ({"queued_prefill_tokens": 50_000, "num_running": 3}, 100, True),  # nobody waits: all of it runs
        ({"num_waiting": [2, 0, 0], "queued_prefill_tokens": 2_800}, 100, True),
        ({"num_waiting": [2, 0, 0], "queued_prefill_tokens": 2_950}, 100, False),
        ({"num_waiting": [2, 0, 0], "queued_prefill_tokens": 2_990, "num_running": 60}, 70, True),
        (
            {"num_waiting": [2, 0, 0], "queued_prefill_tokens": 1_400},
            7_000,
            True,
        ),  # half of 150 ms for a long one
        ({"num_waiting": [2, 0, 0], "queued_prefill_tokens": 1_600}, 7_000, False),
        # Where nothing is known of the speed, or it is low, a few steps' tokens may wait.
        ({"num_waiting": [2, 0, 0], "queued_prefill_tokens": 1_900, "prefill_tokens_per_s": 0.0}, 100, True),
        ({"num_waiting": [2, 0, 0], "queued_prefill_tokens": 2_100, "prefill_tokens_per_s": 0.0}, 100, False),
    ],
)
def test_a_worker_gets_no_prompt_that_would_wait_there_for_long(
    status: dict[str, Any], num_prompt_tokens: int, taken: bool
) -> None:
    assert takes(router(**status), num_prompt_tokens) == taken


def test_prompts_of_lower_classes_are_not_ahead() -> None:
    found = router(num_waiting=[0, 0, 4], queued_prefill_tokens=8_000)
    assert takes(found)
    assert not takes(found, priority=BATCH)
    some_of_both = router(num_waiting=[1, 0, 3], queued_prefill_tokens=8_000)
    assert takes(some_of_both)
    assert not takes(some_of_both, num_prompt_tokens=1_200)


def test_what_is_on_its_way_is_ahead_until_the_heartbeat_counts_it() -> None:
    found = router()
    request = make_request(prompt_token_ids=list(range(1_000)))
    for _ in range(3):
        worker = found.choose(request, 16)
        assert isinstance(worker, Worker)
        found.dispatch(worker, request, 16)
    assert not takes(found)
    assert len(found.workers(MODEL)[0].in_flight[0]) == 3


def test_batch_leaves_a_tenth_of_the_places() -> None:
    assert takes(router(num_running=57), priority=BATCH)
    assert not takes(router(num_running=58), priority=BATCH)
    assert takes(router(num_running=63))
    assert takes(router(max_num_seqs=1), priority=BATCH)
