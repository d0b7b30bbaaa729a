import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.prefix_sketch import (
    DEPTHS,
    MAX_KEYS,
    SKETCH_BYTES,
    holds,
    is_shared,
    make_sketch,
    prefix_keys,
)

PROMPT = list(range(5_000))


def test_a_key_for_every_depth_that_the_prompt_reaches() -> None:
    assert prefix_keys(PROMPT[:63], "a") == []
    assert len(prefix_keys(PROMPT[:64], "a")) == 1
    assert len(prefix_keys(PROMPT, "a")) == len(DEPTHS)
    assert prefix_keys(PROMPT, "a", start=100) == prefix_keys(PROMPT, "a")[2:]


@given(st.integers(0, 4_999), st.integers(64, 5_000))
def test_keys_are_equal_exactly_up_to_the_first_token_that_differs(changed: int, length: int) -> None:
    other = [*PROMPT]
    other[changed] += 1
    same = [
        a == b
        for a, b in zip(prefix_keys(PROMPT[:length], "a"), prefix_keys(other[:length], "a"), strict=True)
    ]
    assert same == [changed >= depth for depth in DEPTHS if depth <= length]


def test_no_key_is_another_tenants() -> None:
    assert not set(prefix_keys(PROMPT, "a")) & set(prefix_keys(PROMPT, "b"))


def test_the_same_in_every_process() -> None:
    assert prefix_keys(PROMPT[:64], "demo") == [0x178F652228BA434]


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_refuses_what_is_no_token_id(token_id: int) -> None:
    with pytest.raises(ValueError, match="token ids"):
        prefix_keys([token_id] * 64, "a")


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=200), st.booleans())
def test_a_sketch_holds_all_that_was_put_in(keys: list[int], shared: bool) -> None:
    sketch = make_sketch(keys, shared=shared)
    assert len(sketch) == SKETCH_BYTES
    assert is_shared(sketch) is shared
    assert all(holds(sketch, key) for key in keys)


def test_a_full_sketch_seldom_holds_what_was_not_put_in() -> None:
    rng = random.Random(1)
    sketch = make_sketch((rng.getrandbits(64) for _ in range(MAX_KEYS)), shared=False)
    false = sum(holds(sketch, rng.getrandbits(64)) for _ in range(10_000))
    assert 150 < false < 350
    assert not holds(make_sketch([], shared=False), 1)
