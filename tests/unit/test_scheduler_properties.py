"""Bursts, lengths, cancels, retries, attempts, back-pressure, small pools: what must hold in any of them."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.priority import PriorityClass
from tests.engine_factories import EOS, make_config, make_request
from tests.engine_run import VOCAB_SIZE, Arrival, Cancel, Pools, run_to_the_end
from workers.scheduler_config import SchedulerConfig


def prompt(beginning: int, period: int, length: int) -> list[int]:
    """Few beginnings and periods make prefixes that requests and tenants have in common."""
    return ([beginning] * 16 + [beginning, period] * 40)[:length]


arrivals = st.builds(
    Arrival,
    st.integers(0, 12),
    st.builds(
        make_request,
        st.integers(1, 9),
        prompt_token_ids=st.builds(prompt, st.integers(2, 3), st.integers(2, 3), st.integers(0, 70)),
        max_tokens=st.integers(1, 60),
        attempt=st.integers(1, 3),
        priority=st.sampled_from(PriorityClass),
        reply_partition=st.integers(0, 3),
        output_token_ids=st.just([]) | st.lists(st.integers(EOS, VOCAB_SIZE - 1), max_size=20),
        expected_output_tokens=st.sampled_from([None, 0, 1, 5, 30]),
        tenant=st.sampled_from(["a", "b"]),
        stop_token_ids=st.just([]) | st.lists(st.integers(2, VOCAB_SIZE - 1), max_size=1),
        stop=st.just([]) | st.lists(st.text("cdef", min_size=1, max_size=4), min_size=1, max_size=3),
        min_tokens=st.integers(0, 8),
        ignore_eos=st.booleans(),
    ),
)
cancels = st.builds(Cancel, st.integers(0, 20), st.integers(1, 9), st.integers(1, 3))
configs = st.builds(
    make_config,
    max_model_len=st.integers(20, 120) | st.just(120),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 200),
    max_prefill_chunk=st.integers(1, 40),
    max_num_waiting=st.integers(1, 8),
    batch_watermark=st.sampled_from([0.0, 0.3]),
    hold_batch_in_prefill=st.booleans(),
    inter_token_target_ms=st.sampled_from([0.0, 2.0, 6.0]),
)
pools = st.builds(
    Pools, st.integers(3, 14), st.sampled_from([0, 2, 20]), st.sampled_from(["off", "tenant", "shared"])
)
blocked = st.dictionaries(st.integers(0, 15), st.frozensets(st.integers(0, 3)))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(arrivals, max_size=20),
    st.lists(cancels, max_size=6),
    configs,
    pools,
    blocked,
    st.sampled_from([0.0, 0.001]),
)
def test_nothing_leaks_every_request_ends_once_and_gets_the_tokens_it_gets_alone(
    arriving: list[Arrival],
    cancelling: list[Cancel],
    config: SchedulerConfig,
    pools: Pools,
    blocked_at: dict[int, frozenset[int]],
    unit_s: float,
) -> None:
    run_to_the_end(config, pools, arriving, cancelling, blocked_at, unit_s)


def crowd(rng: random.Random) -> list[Arrival]:
    """More than fits, in bursts, with lengths that nobody expected."""
    return [
        Arrival(
            rng.choice([0, 0, 5, 6, rng.randrange(60)]),
            make_request(
                number,
                prompt_token_ids=prompt(rng.randint(2, 3), rng.randint(2, 3), rng.randint(1, 90)),
                max_tokens=rng.randint(1, 60),
                priority=rng.choice(list(PriorityClass)),
                reply_partition=rng.randrange(4),
                output_token_ids=[rng.randint(2, 3) for _ in range(rng.choice([0, 0, 0, 20]))],
                expected_output_tokens=rng.choice([1, 1, 5, None]),
                tenant=rng.choice("ab"),
                stop=rng.choice([[], [], ["cd", "efgh", "hhh"]]),
            ),
        )
        for number in range(1, 31)
    ]


@pytest.mark.parametrize("sharing", ["off", "tenant", "shared"])
@pytest.mark.parametrize("num_host_blocks", [0, 6, 100])
def test_a_crowd_in_small_pools(num_host_blocks: int, sharing: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        rng = random.Random(seed)
        config = make_config(
            max_model_len=150,
            max_num_seqs=rng.choice([3, 8]),
            max_num_batched_tokens=rng.choice([16, 64]),
            max_prefill_chunk=rng.choice([5, 16, 40]),
            max_num_waiting=100,
            batch_watermark=rng.choice([0.0, 0.2]),
            hold_batch_in_prefill=rng.random() < 0.5,
            inter_token_target_ms=rng.choice([0.0, 2.0, 4.0]),
        )
        blocked_at = {rng.randrange(40): frozenset({rng.randrange(4)}) for _ in range(10)}
        run = run_to_the_end(
            config,
            Pools(rng.randint(10, 16), num_host_blocks, sharing),
            crowd(rng),
            [Cancel(rng.randrange(60), rng.randint(1, 30), 1) for _ in range(4)],
            blocked_at,
            unit_s=0.001,
        )
        seen += run.seen
        seen["hits"] += run.engine.kv_cache_manager.prefix_cache_hits
    # The test is worth nothing unless all of this happened in it.
    wanted = {"held", "resumed", "stop string"}
    if num_host_blocks:
        wanted |= {"no_free_block swap", "higher_class_seqs swap", "swap in"}
    else:
        wanted |= {"no_free_block recompute", "higher_class_seqs recompute", "higher_class_blocks recompute"}
    if sharing != "off":
        wanted |= {"hits"}
    assert {what for what in wanted if not seen[what]} == set()
