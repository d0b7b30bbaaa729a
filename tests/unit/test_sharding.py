"""How a decoder is cut: every part on some rank, in order, and each query head beside its own KV head."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decoder_files import CONFIGS
from workers.models.decoder_config import DecoderConfig
from workers.models.hugging_face_config import decoder_config
from workers.models.sharding import MOST_PIECES, Sharding, exact_pieces, shard

BASE = decoder_config(CONFIGS["llama"], "config.json")


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    num_kv_heads = draw(st.integers(1, 16))
    return replace(
        BASE,
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.integers(1, 12)),
        intermediate_size=draw(st.sampled_from([1, 96, 1024])) * draw(st.integers(1, 12)),
        head_dim=2 * draw(st.integers(1, 4)),
    )


@st.composite
def shardings(draw: st.DrawFn) -> list[Sharding]:
    """Of all ranks of a model."""
    config, exact = draw(configs()), draw(st.booleans())
    num_ranks = draw(st.sampled_from([n for n in range(1, 17) if is_possible(config, n, exact)]))
    return [shard(config, num_ranks, rank, exact=exact) for rank in range(num_ranks)]


def is_possible(config: DecoderConfig, num_ranks: int, exact: bool) -> bool:
    try:
        shard(config, num_ranks, 0, exact=exact)
    except ValueError:
        return False
    return True


@given(shardings(), st.integers(MOST_PIECES**2 * 4, 2000))
def test_the_ranks_have_every_part_once_and_in_order(ranks: list[Sharding], vocab_size: int) -> None:
    config = ranks[0].config
    assert [i for rank in ranks for i in rank.own_pieces] == [*range(ranks[0].num_pieces)]
    assert [i for rank in ranks for i in rank.query_rows] == [*range(config.query_size)]
    assert [i for rank in ranks for i in rank.intermediate] == [*range(config.intermediate_size)]
    assert [i for rank in ranks for i in rank.vocab(vocab_size)] == [*range(vocab_size)]
    assert {i for rank in ranks for i in rank.kv_rows} == {*range(config.kv_size)}


@given(shardings())
def test_a_query_head_attends_to_its_own_kv_head(ranks: list[Sharding]) -> None:
    config = ranks[0].config
    group = config.num_heads // config.num_kv_heads
    seen = []
    for rank in ranks:
        first_head = rank.query_rows.start // config.head_dim
        first_kv_head = rank.kv_rows.start // config.head_dim
        assert len(rank.attention_pieces) == len(rank.own_pieces)
        for heads, kv_heads in rank.attention_pieces:
            num_heads, num_kv_heads = heads.stop - heads.start, kv_heads.stop - kv_heads.start
            assert 0 <= kv_heads.start < kv_heads.stop <= rank.num_kv_heads
            for head in range(num_heads):
                kv_head = kv_heads.start + head // (num_heads // num_kv_heads)
                seen.append((first_head + heads.start + head, first_kv_head + kv_head))
    assert seen == [(head, head // group) for head in range(config.num_heads)]


@given(configs())
def test_exact_pieces_do_not_depend_on_the_ranks(config: DecoderConfig) -> None:
    count = exact_pieces(config)
    for num_ranks in range(1, MOST_PIECES + 1):
        if is_possible(config, num_ranks, exact=True):
            assert shard(config, num_ranks, num_ranks - 1, exact=True).num_pieces == count


@pytest.mark.parametrize(
    ("changes", "num_ranks", "exact", "message"),
    [
        ({}, 3, False, "HEADRACE_TENSOR_PARALLEL is 3: the model's 4 heads are no multiple of it"),
        ({"intermediate_size": 97}, 2, False, "the model's intermediate size, 97, is no multiple of it"),
        (
            {"num_heads": 12, "num_kv_heads": 4},
            6,
            False,
            "the model's 4 KV heads are neither a multiple nor a divisor of it",
        ),
        (
            {"num_heads": 32, "num_kv_heads": 8, "intermediate_size": 14336},
            16,
            True,
            "HEADRACE_TENSOR_PARALLEL is 16: deterministic mode computes this model in 8 pieces",
        ),
    ],
)
def test_what_does_not_divide_is_refused(
    changes: dict[str, Any], num_ranks: int, exact: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shard(replace(BASE, **changes), num_ranks, 0, exact=exact)
