import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.roofline import DEVICES, MODELS, Roofline, StepLoad
from workers.step_time import StepTimeModel, num_attended_pairs

Load = tuple[int, int, int]


def linear(num_seqs: int, num_tokens: int, num_context: int) -> float:
    return 0.012 + 0.002 * num_seqs + 0.0005 * num_tokens + 1e-6 * num_context


def random_load(rng: random.Random) -> Load:
    return rng.randint(1, 64), rng.choice([0, 0, rng.randint(1, 512)]), rng.randint(1, 50_000)


def learned(
    truth: Callable[[int, int, int], float],
    num_steps: int = 300,
    disturb: Callable[[int], float] = lambda _: 0.0,
) -> StepTimeModel:
    model = StepTimeModel()
    rng = random.Random(1)
    for step in range(num_steps):
        load = random_load(rng)
        model.observe(*load, truth(*load) + disturb(step))
    return model


@pytest.mark.parametrize("load", [(1, 0, 100), (32, 0, 20_000), (8, 512, 4000), (64, 100, 50_000)])
def test_a_linear_machine_is_learned(load: Load) -> None:
    assert learned(linear).predict(*load) == pytest.approx(linear(*load), rel=0.02)


def test_a_machine_that_stands_still_now_and_then_shuts_nothing_down() -> None:
    model = learned(linear, disturb=lambda step: 2.0 if step % 20 == 0 else 0.0)
    for load in ((1, 0, 100), (32, 0, 20_000), (8, 512, 4000)):
        assert model.predict(*load) == pytest.approx(linear(*load), rel=0.1)


def test_the_first_steps_which_compile_kernels_are_soon_forgotten() -> None:
    model = learned(linear, num_steps=60, disturb=lambda step: 10.0 if step < 4 else 0.0)
    assert model.predict(32, 0, 20_000) == pytest.approx(linear(32, 0, 20_000), rel=0.1)


def test_a_slower_machine_is_noticed() -> None:
    model = learned(linear)
    rng = random.Random(2)
    for _ in range(150):
        load = random_load(rng)
        model.observe(*load, 2 * linear(*load))
    assert model.predict(32, 0, 20_000) == pytest.approx(2 * linear(32, 0, 20_000), rel=0.15)


def test_near_the_batches_of_late_a_bent_machine_is_met() -> None:
    def bent(num_seqs: int, num_tokens: int, num_context: int) -> float:
        return max(0.006, 2e-5 * (num_seqs + num_tokens)) + 1e-7 * num_context

    model = learned(bent)
    for _ in range(50):
        model.observe(60, 400, 20_000, bent(60, 400, 20_000))
        model.observe(60, 0, 20_000, bent(60, 0, 20_000))
    assert model.predict(60, 400, 20_000) == pytest.approx(bent(60, 400, 20_000), rel=0.03)
    assert model.predict(60, 0, 20_000) == pytest.approx(bent(60, 0, 20_000), rel=0.03)


def test_no_coefficient_is_negative_whatever_is_observed() -> None:
    model = StepTimeModel()
    rng = random.Random(3)
    for _ in range(500):
        model.observe(*random_load(rng), rng.choice([0.0, 1e-7, 0.01, 5.0]), rng.randint(0, 10**7))
        coefficients = model.base, model.per_seq, model.per_token, model.per_context, model.per_pair
        assert min(coefficients) >= 0.0
        assert model.predict(10, 10, 10) < float("inf")


def test_what_was_not_seen_for_long_is_kept() -> None:
    model = learned(linear)
    for step in range(5000):
        model.observe(8, 0, 2000 + step % 100, linear(8, 0, 2000 + step % 100))
    assert model.predict(8, 512, 2000) == pytest.approx(linear(8, 512, 2000), rel=0.1)


def test_predictions_reach_at_most_twice_as_far_as_what_was_seen() -> None:
    model = StepTimeModel()
    assert (model.max_num_seqs, model.max_num_tokens) == (2, 64)
    model.observe(10, 100, 1000, 0.01)
    assert (model.max_num_seqs, model.max_num_tokens) == (20, 200)


def test_late_chunks_of_long_prompts_are_known_to_take_longer() -> None:
    gpu, model, rng = Roofline(DEVICES["h100"], MODELS["8b"]), StepTimeModel(), random.Random(4)
    errors: list[float] = []
    for num_prompts in range(60):
        contexts = [rng.randint(100, 3_000) for _ in range(rng.randint(4, 40))]
        decodes = [(context, 1, True) for context in contexts]
        num_new = 512 - len(contexts)
        for computed in [*range(0, rng.choice([2_000, 8_000, 32_000]), num_new), *[-1] * 20]:
            is_decode = computed < 0
            load = StepLoad.of(decodes if is_decode else [*decodes, (computed, num_new, False)])
            seconds = gpu.step_seconds(load) * rng.uniform(0.98, 1.02)
            sizes = (
                (len(decodes), 0, load.context_tokens, 0)
                if is_decode
                else (
                    len(decodes) + 1,
                    num_new - 1,
                    load.context_tokens,
                    num_attended_pairs(computed, num_new - 1),
                )
            )
            if num_prompts >= 10:
                errors.append(abs(model.predict(*sizes) / seconds - 1))
            model.observe(*sizes[:3], seconds, sizes[3])
    errors.sort()
    # Without the pairs: 0.5 at p95, and twice what a step takes at most.
    assert errors[int(0.95 * len(errors))] < 0.05
    assert errors[-1] < 0.2


@given(computed=st.integers(0, 100_000), num_new=st.integers(1, 2_000))
def test_pairs_are_those_of_the_tokens_beyond_the_first(computed: int, num_new: int) -> None:
    first, whole = (StepLoad.of([(computed, n, True)]).attended_pairs for n in (1, num_new))
    assert num_attended_pairs(computed, num_new - 1) == whole - first


@given(
    per_token=st.floats(1e-7, 1e-3),
    per_context=st.floats(0, 1e-6),
    per_pair=st.floats(0, 1e-7),
    seconds=st.floats(0, 0.1),
    computed=st.integers(0, 100_000),
)
def test_a_chunk_is_as_long_as_its_time_allows(
    per_token: float, per_context: float, per_pair: float, seconds: float, computed: int
) -> None:
    model = StepTimeModel()
    model.observe(8, 500, 10_000, 0.01)
    model.base = model.per_seq = 0.0
    model.per_token, model.per_context, model.per_pair = per_token, per_context, per_pair

    def line(num_further: int) -> float:
        return model.line(0, num_further, num_further, num_attended_pairs(computed, num_further))

    found = model.num_further_in(seconds, computed)
    assert line(found) <= seconds * (1 + 1e-9)
    assert found == model.max_num_tokens or line(found + 1) >= seconds * (1 - 1e-9)
