"""The prefix cache under an engine whose runner checks that every block holds what it is read as."""

import itertools
import random
from statistics import fmean

import pytest

from tests.engine_factories import make_config, make_engine, make_request
from tests.engine_run import Arrival, Pools, run_to_the_end
from workers.engine import Engine
from workers.request import Request

SYSTEM_PROMPT = [2 + position % 90 for position in range(64)]


def run(engine: Engine, *requests: Request) -> None:
    for request in requests:
        assert engine.add_request(request) == []
    while engine.scheduler.has_requests:
        engine.step()


def ask(number: int, question: int, *, tenant: str = "a", max_tokens: int = 4) -> Request:
    """A request that begins with the system prompt."""
    return make_request(
        number, prompt_token_ids=[*SYSTEM_PROMPT, question, question], max_tokens=max_tokens, tenant=tenant
    )


def test_hit_and_miss_give_equal_output() -> None:
    arriving = [Arrival(at, ask(1 + at % 5, 2 + at % 3, tenant="ab"[at % 2])) for at in range(0, 60, 4)]
    config = make_config(max_model_len=200)
    outputs = []
    for sharing in ("off", "tenant", "shared"):
        # run_to_the_end compares each output with that of the request alone in an engine without a cache.
        requests = [Arrival(a.at_step, ask_again(a.request)) for a in arriving]
        done = run_to_the_end(config, Pools(100, sharing=sharing), requests)
        outputs.append([r.output_token_ids for r in done.added])
        assert (done.engine.kv_cache_manager.prefix_cache_hits > 0) == (sharing != "off")
    assert outputs[0] == outputs[1] == outputs[2]


def ask_again(request: Request) -> Request:
    return Request(
        request_id=request.request_id,
        attempt=request.attempt,
        priority=request.priority,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        reply_partition=request.reply_partition,
        tenant=request.tenant,
    )


def test_cached_tokens_are_told_and_cover_the_prompt_alone() -> None:
    engine = make_engine(sharing="tenant")
    first, second = ask(1, 5, max_tokens=40), ask(2, 6)
    run(engine, first)
    run(engine, second)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)

    whole = first.prompt_token_ids + first.output_token_ids
    follow_up = make_request(3, prompt_token_ids=[*whole, 7], tenant="a")
    run(engine, follow_up)
    assert follow_up.num_cached_tokens == 96, "of 106 tokens the last was never computed, and blocks are full"

    resumed = make_request(
        4, prompt_token_ids=whole[:66], output_token_ids=whole[66:], max_tokens=50, tenant="a"
    )
    run(engine, resumed)
    assert resumed.num_cached_tokens == 66, "output that was found again is no prompt"


def test_requests_that_come_together_compute_their_prefix_once() -> None:
    engine = make_engine(sharing="tenant")
    requests = [ask(number, number) for number in range(1, 9)]
    for request in requests:
        engine.add_request(request)
    num_computed = 0
    while engine.scheduler.has_requests:
        num_computed += engine.step()[0].total_num_scheduled_tokens
    own = sum(r.num_tokens - len(SYSTEM_PROMPT) - 1 for r in requests)
    assert num_computed == len(SYSTEM_PROMPT) + own
    assert [r.num_cached_tokens for r in requests] == [0] + [64] * 7


def test_a_running_prefix_takes_its_blocks_once() -> None:
    engine = make_engine(num_blocks=100, sharing="tenant")
    for number in range(1, 6):
        engine.add_request(ask(number, number, max_tokens=8))
    for _ in range(4):
        engine.step()
    assert engine.scheduler.num_running == 5
    assert engine.pool.num_blocks - engine.pool.num_free_blocks == 4 + 5


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(["a", "b", "c"], 2)])
def test_one_tenant_learns_nothing_of_another(one: str, other: str) -> None:
    engine = make_engine(sharing="tenant")
    run(engine, ask(1, 5, tenant=one))
    stranger, owner = ask(2, 5, tenant=other), ask(3, 5, tenant=one)
    run(engine, stranger)
    run(engine, owner)
    assert (stranger.num_cached_tokens, owner.num_cached_tokens) == (0, 64)


def test_tenants_that_share_find_one_anothers_prefixes() -> None:
    engine = make_engine(sharing="shared")
    run(engine, ask(1, 5, tenant="a"))
    other = ask(2, 5, tenant="b")
    run(engine, other)
    assert other.num_cached_tokens == 64


@pytest.mark.parametrize("num_blocks", [6, 7, 12])
def test_a_pool_that_is_smaller_than_the_prefixes_under_churn(num_blocks: int) -> None:
    """Three system prompts of 4 blocks each, asked in turns: some are always just being evicted."""
    rng = random.Random(num_blocks)
    arriving = [
        Arrival(
            step,
            make_request(
                number,
                prompt_token_ids=[rng.randint(2, 4)] * 64 + [5 + number % 3],
                max_tokens=rng.randint(1, 20),
                tenant=rng.choice("ab"),
            ),
        )
        for number, step in enumerate(range(0, 200, 2), start=1)
    ]
    config = make_config(max_model_len=96, max_num_waiting=200)
    done = run_to_the_end(config, Pools(num_blocks, sharing="tenant"), arriving)
    assert done.engine.pool.evictions > 100
    assert done.engine.kv_cache_manager.prefix_cache_hits > 0


@pytest.mark.parametrize("sharing", ["off", "tenant"])
def test_fragmentation_of_a_usual_mix_stays_below_5_percent(sharing: str) -> None:
    """Prompts and answers as long-tailed as chats have them, 64 at a time, in a pool that is always full."""
    rng = random.Random(1)
    engine = make_engine(num_blocks=3000, sharing=sharing, max_num_seqs=64, max_num_batched_tokens=512)
    numbers = itertools.count(1)
    samples = []
    for step in range(600):
        while engine.scheduler.num_waiting < 4:
            length = min(3000, int(rng.lognormvariate(5.6, 1.0)) + 8)
            shared = SYSTEM_PROMPT if rng.random() < 0.5 else []
            question = [rng.randint(2, 900) for _ in range(length)]
            max_tokens = min(900, int(rng.lognormvariate(5.0, 0.8)) + 4)
            engine.add_request(
                make_request(
                    next(numbers), prompt_token_ids=shared + question, max_tokens=max_tokens, tenant="a"
                )
            )
        engine.step()
        if step >= 100:
            samples.append(engine.scheduler.fragmentation())
    assert engine.scheduler.num_running > 32
    print(f"fragmentation {sharing}: mean {fmean(samples):.2%}, most {max(samples):.2%}")
    assert max(samples) < 0.05
