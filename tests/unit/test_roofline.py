"""The textbook: 70B in FP8 on 8 x H100, KV and arithmetic in BF16, 50 % of the peak in compute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.roofline import DEVICES, MODELS, DType, Roofline, StepLoad

TEXTBOOK = Roofline(DEVICES["h100"], MODELS["70b"], tensor_parallel=8)


def decodes(num_seqs: int, context: int) -> StepLoad:
    return StepLoad.of([(context - 1, 1, True)] * num_seqs)


def prefill(num_tokens: int) -> StepLoad:
    return StepLoad.of([(0, num_tokens, True)])


def test_parameters_are_those_of_the_models() -> None:
    assert MODELS["8b"].num_parameters == pytest.approx(8.03e9, rel=0.001)
    assert MODELS["70b"].num_parameters == pytest.approx(70.55e9, rel=0.001)


def test_kv_of_a_token_takes_320_kb_in_bf16() -> None:
    assert TEXTBOOK.kv_bytes_per_token == 320 * 1024
    assert TEXTBOOK.bytes_per_block == 16 * 320 * 1024
    fp8 = Roofline(DEVICES["h100"], MODELS["70b"], 8, kv_dtype=DType.FP8)
    assert fp8.kv_bytes_per_token == 160 * 1024


def test_eight_h100_hold_one_and_a_half_million_tokens_in_500_gb() -> None:
    assert TEXTBOOK.kv_bytes == pytest.approx(500e9, rel=0.02)
    assert TEXTBOOK.num_blocks * 16 == pytest.approx(1.5e6, rel=0.03)
    assert TEXTBOOK.num_blocks * TEXTBOOK.bytes_per_block <= TEXTBOOK.kv_bytes
    assert TEXTBOOK.num_blocks * 16 // 2500 == pytest.approx(600, rel=0.03)


def test_600_sequences_take_20_ms_a_step_and_100_take_6() -> None:
    # Both roofs meet at 600: reading the cache takes 21 ms, multiplying at half the peak 22.
    step = TEXTBOOK.step_seconds(decodes(600, 2500))
    assert step == pytest.approx(0.020, rel=0.12)
    assert 600 / step == pytest.approx(30_000, rel=0.12)
    assert TEXTBOOK.memory_seconds(decodes(600, 2500)) == pytest.approx(0.021, rel=0.01)
    assert TEXTBOOK.step_seconds(decodes(100, 2500)) == pytest.approx(0.006, rel=0.05)


def test_a_prefill_of_2000_tokens_takes_70_ms() -> None:
    assert TEXTBOOK.step_seconds(prefill(2000)) == pytest.approx(0.070, rel=0.02)
    full = Roofline(DEVICES["h100"], MODELS["70b"], 8, compute_utilisation=1.0)
    assert full.step_seconds(prefill(2000)) == pytest.approx(0.035, rel=0.03)


def test_small_batches_are_bound_by_memory_and_prefills_by_compute() -> None:
    one = decodes(1, 2500)
    assert TEXTBOOK.memory_seconds(one) > 10 * TEXTBOOK.compute_seconds(one)
    assert TEXTBOOK.compute_seconds(prefill(2000)) > 10 * TEXTBOOK.memory_seconds(prefill(2000))


def test_fp8_doubles_the_flops_and_h200_only_the_memory() -> None:
    load = prefill(2000)
    fp8 = Roofline(DEVICES["h100"], MODELS["70b"], 8, compute_dtype=DType.FP8)
    assert TEXTBOOK.compute_seconds(load) / fp8.compute_seconds(load) == pytest.approx(2, rel=0.01)
    h200 = Roofline(DEVICES["h200"], MODELS["70b"], 8)
    assert h200.compute_seconds(load) == TEXTBOOK.compute_seconds(load)
    assert TEXTBOOK.memory_seconds(load) / h200.memory_seconds(load) == pytest.approx(4.8 / 3.35)


def test_swap_goes_over_the_pcie_link_of_each_gpu() -> None:
    assert TEXTBOOK.swap_bytes_per_s == pytest.approx(8 * 64e9 * 0.8)
    # 2,500 tokens: 157 blocks, 823 MB.
    assert TEXTBOOK.swap_seconds(157) == pytest.approx(0.823e9 / 409.6e9, rel=0.01)


chunks = st.lists(
    st.tuples(st.integers(0, 30_000), st.integers(1, 512), st.booleans()), min_size=1, max_size=20
)
rooflines = st.builds(
    Roofline,
    st.sampled_from([DEVICES["h200"], DEVICES["b200"]]),
    st.sampled_from(list(MODELS.values())),
    st.sampled_from([2, 4, 8]),
    st.sampled_from(DType),
    st.sampled_from(DType),
    st.sampled_from(DType),
)


@given(rooflines, chunks, st.tuples(st.integers(0, 30_000), st.integers(1, 512), st.booleans()))
def test_a_step_never_gets_shorter_by_a_sequence_more(
    roofline: Roofline, some: list[tuple[int, int, bool]], one: tuple[int, int, bool]
) -> None:
    assert roofline.step_seconds(StepLoad.of([*some, one])) >= roofline.step_seconds(StepLoad.of(some))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_a_prompt_in_chunks_attends_to_the_same_pairs_as_in_one_piece(sizes: list[int]) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    in_chunks = StepLoad.of((start, size, False) for start, size in zip(starts, sizes, strict=True))
    assert in_chunks.attended_pairs == StepLoad.of([(0, sum(sizes), False)]).attended_pairs


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tensor_parallel": 3}, "must divide the 8 KV heads, got 3"),
        ({"tensor_parallel": 0}, "must divide"),
        ({"tensor_parallel": 1, "weight_dtype": DType.BF16}, "141 GB of weights leave no room"),
        ({"tensor_parallel": 8, "compute_utilisation": 0.0}, "compute_utilisation must be above 0"),
        ({"tensor_parallel": 8, "memory_share": 1.5}, "memory_share must be above 0 and at most 1"),
        ({"tensor_parallel": 8, "overhead_s": -1.0}, "overhead_s must not be negative"),
    ],
)
def test_refuses_what_cannot_be(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Roofline(DEVICES["h100"], MODELS["70b"], **changed)  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_80_gb_is_told_how_many_gpus_it_needs() -> None:
    """The 70B has 141 GB of bf16 weights; in FP8 they leave 1.4 GB of one GPU's 72."""
    h100, model = DEVICES["h100"], MODELS["70b"]
    with pytest.raises(ValueError, match=r"141 GB of weights .* it needs tensor_parallel >= 2"):
        Roofline(h100, model, tensor_parallel=1, weight_dtype=DType.BF16)
    Roofline(h100, model, tensor_parallel=2, weight_dtype=DType.BF16)
    Roofline(h100, model, tensor_parallel=1, weight_dtype=DType.FP8)
