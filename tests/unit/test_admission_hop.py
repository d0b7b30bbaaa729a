"""The cost model: when a prompt is computed elsewhere than its request is decoded."""

from dataclasses import replace

import pytest

from streams.admission.hop import Hop, HopPolicy, here, hop, visible_ms

# A 70b model on four GPUs: 2,000 tokens take 145 ms, and are 655 MB of KV.
SEEN = Hop(
    prompt_tokens=2_000,
    decode_cached_tokens=0,
    decode_queued_tokens=0,
    decode_tokens_per_s=0.0,
    decode_streams=32,
    prefill_cached_tokens=0,
    prefill_queued_tokens=0,
    prefill_tokens_per_s=13_800.0,
    kv_bytes_per_token=327_680,
    transfer_bytes_per_s=50e9,
    num_layers=80,
)
POLICY = HopPolicy()


def test_layers_are_sent_while_later_ones_are_computed() -> None:
    assert visible_ms(145.0, 13.1, 80) == pytest.approx(13.1 / 80)
    assert visible_ms(145.0, 13.1, 1) == 13.1  # nothing overlaps
    assert visible_ms(145.0, 13.1, 0) == 13.1
    # A slow link goes on after the last layer: all but what was sent beside the first 79.
    assert visible_ms(80.0, 800.0, 80) == pytest.approx(800.0 - 79.0)


@pytest.mark.parametrize("layers", [1, 2, 7, 80])
@pytest.mark.parametrize(("compute", "transfer"), [(10.0, 3.0), (3.0, 10.0), (5.0, 5.0), (0.0, 4.0)])
def test_the_formula_is_what_a_pipeline_of_two_stages_takes(
    layers: int, compute: float, transfer: float
) -> None:
    sent = 0.0
    for layer in range(1, layers + 1):
        sent = max(sent, layer * compute / layers) + transfer / layers
    assert visible_ms(compute, transfer, layers) == pytest.approx(sent - compute)


def test_a_long_prompt_beside_many_streams_goes_by_way_of_prefill() -> None:
    assert POLICY.hops(SEEN)
    assert hop(POLICY, SEEN) == pytest.approx(144.9 + 13.1 / 80 + 5.0, abs=0.1)
    assert here(POLICY, SEEN) == pytest.approx(144.9 * (1 + 3.2), abs=0.2)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": 16},  # too short: the handoff takes longer
        {"decode_cached_tokens": 1_984},  # its beginning is there
        {"decode_streams": 0},  # nobody is held up
        {"prefill_queued_tokens": 20_000},
        {"transfer_bytes_per_s": 0.5e9},
    ],
)
def test_stays_where_that_costs_less(change: dict[str, float]) -> None:
    assert not POLICY.hops(replace(SEEN, **change))  # type: ignore[arg-type]


def test_goes_where_its_beginning_is_and_nobody_waits() -> None:
    queued = replace(SEEN, prefill_queued_tokens=7_000)
    assert not POLICY.hops(queued)
    assert POLICY.hops(replace(queued, prefill_cached_tokens=1_984))
    assert POLICY.hops(replace(queued, decode_queued_tokens=9_000))


def test_without_room_for_the_prompt_at_decode_there_is_one_way() -> None:
    short = replace(SEEN, prompt_tokens=16)
    assert not POLICY.hops(short)
    assert POLICY.hops(replace(short, decode_takes_whole=False))


def test_while_no_rate_is_known_the_length_decides() -> None:
    unknown = replace(SEEN, prefill_tokens_per_s=0.0)
    assert here(POLICY, unknown) is hop(POLICY, unknown) is None
    assert POLICY.hops(unknown)
    assert not POLICY.hops(replace(unknown, prompt_tokens=255))
    assert HopPolicy(unmeasured_tokens=128).hops(replace(unknown, prompt_tokens=255))
    # The rate of either side is taken for the other's, and an unknown bandwidth for no hindrance.
    assert POLICY.hops(replace(unknown, decode_tokens_per_s=13_800.0))
    assert POLICY.hops(replace(SEEN, transfer_bytes_per_s=0.0))


def test_a_unified_slot_takes_it_where_neither_way_over_decode_costs_less() -> None:
    cheapest = hop(POLICY, SEEN)
    assert cheapest is not None
    assert POLICY.takes_unified(replace(SEEN, unified_ms=cheapest))
    assert not POLICY.takes_unified(replace(SEEN, unified_ms=cheapest + 1.0))
    assert not POLICY.takes_unified(SEEN)
    assert POLICY.takes_unified(replace(SEEN, unified_ms=1e6, prefill_tokens_per_s=0.0))


def test_what_is_recorded_decides_the_same_again() -> None:
    for seen in (SEEN, replace(SEEN, unified_ms=12.5, decode_takes_whole=False)):
        assert Hop.from_inputs({"other": 1.0, **seen.inputs()}) == seen
    assert Hop.from_inputs({"other": 1.0}) is None


def test_switched_off_nothing_hops() -> None:
    off = HopPolicy(enabled=False)
    assert not off.hops(SEEN)
    assert not off.hops(replace(SEEN, decode_takes_whole=False))
