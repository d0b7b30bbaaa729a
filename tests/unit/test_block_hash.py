import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.block_hash import BlockHasher, PrefixSharing

TOKENS = list(range(1000, 1064))


def make_hasher(
    model: str = "m",
    layout: str = "bf16",
    sharing: PrefixSharing = PrefixSharing.TENANT,
    block_size: int = 16,
) -> BlockHasher:
    return BlockHasher(model, layout, sharing, block_size)


def hashes_of(hasher: BlockHasher, tokens: list[int], tenant: str = "t", adapter: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    hasher.extend(hashes, tokens, tenant, adapter)
    return hashes


def test_equal_sequences_have_equal_hashes_in_any_two_hashers() -> None:
    assert hashes_of(make_hasher(), TOKENS) == hashes_of(make_hasher(), TOKENS)
    assert len(hashes_of(make_hasher(), TOKENS)) == 4


@given(cut=st.integers(0, 4))
def test_a_chain_that_is_made_in_two_calls_is_the_same(cut: int) -> None:
    hasher = make_hasher()
    hashes = hashes_of(hasher, TOKENS[: 16 * cut])
    hasher.extend(hashes, TOKENS[16 * cut :], "t")
    assert hashes == hashes_of(hasher, TOKENS)


@given(position=st.integers(0, 63))
def test_another_token_changes_its_block_and_all_that_follow(position: int) -> None:
    other = [*TOKENS]
    other[position] += 1
    same = [
        a == b for a, b in zip(hashes_of(make_hasher(), TOKENS), hashes_of(make_hasher(), other), strict=True)
    ]
    assert same == [index < position // 16 for index in range(4)]


def test_equal_blocks_at_two_places_have_different_hashes() -> None:
    assert len(set(hashes_of(make_hasher(), [7] * 64))) == 4


def test_every_part_of_the_domain_separates() -> None:
    chains = [
        hashes_of(make_hasher(), TOKENS),
        hashes_of(make_hasher(), TOKENS, tenant="u"),
        hashes_of(make_hasher(), TOKENS, adapter="a"),
        hashes_of(make_hasher(model="n"), TOKENS),
        hashes_of(make_hasher(layout="fp32"), TOKENS),
        hashes_of(make_hasher(sharing=PrefixSharing.SHARED), TOKENS),
        hashes_of(make_hasher(block_size=32), TOKENS),
    ]
    assert all(set(a).isdisjoint(b) for a, b in itertools.combinations(chains, 2))


def test_what_moves_between_two_parts_of_the_domain_still_separates() -> None:
    assert hashes_of(make_hasher("ab", "c"), TOKENS) != hashes_of(make_hasher("a", "bc"), TOKENS)


def test_tenants_meet_only_when_all_share() -> None:
    private, shared = make_hasher(), make_hasher(sharing=PrefixSharing.SHARED)
    tenants = ["a", "b", "a-b", ""]
    for one, other in itertools.combinations(tenants, 2):
        assert set(hashes_of(private, TOKENS, one)).isdisjoint(hashes_of(private, TOKENS, other))
        assert hashes_of(shared, TOKENS, one) == hashes_of(shared, TOKENS, other)


@pytest.mark.parametrize("token_id", [-1, 1 << 32, 1 << 70])
def test_refuses_token_ids_that_no_vocabulary_has(token_id: int) -> None:
    hashes = [b"x" * 32]
    with pytest.raises(ValueError, match="token ids must be in"):
        make_hasher().extend(hashes, [*TOKENS[:15], token_id])
    assert len(hashes) == 1


def test_refuses_a_block_that_is_not_full() -> None:
    with pytest.raises(ValueError, match="15 token ids do not fill blocks of 16"):
        make_hasher().extend([], TOKENS[:15])


def test_roots_of_many_tenants_are_kept_within_bounds() -> None:
    hasher = make_hasher()
    for number in range(5000):
        hasher.root(f"tenant-{number}", "")
    info = hasher.root.cache_info()
    assert info.maxsize is not None
    assert info.currsize == info.maxsize < 5000
