from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from workers.token_counts import TokenCounts

ids = st.lists(st.integers(0, 2**18), max_size=30)


@given(prompt=ids, output=ids, steps=st.lists(st.integers(0, 30), max_size=5))
def test_counts_equal_a_recount_however_they_were_caught_up(
    prompt: list[int], output: list[int], steps: list[int]
) -> None:
    counts = TokenCounts(prompt)
    for length in [*sorted(steps), len(output)]:
        counts.catch_up(output[:length])
    expected = Counter(output)
    assert dict(zip(counts.token_ids, counts.counts, strict=True)) == {
        token_id: expected[token_id] for token_id in (*prompt, *output)
    }
    assert len(set(counts.token_ids)) == len(counts.token_ids)


def test_without_a_prompt_only_the_output_counts() -> None:
    counts = TokenCounts()
    assert (list(counts.token_ids), list(counts.counts)) == ([], [])
    counts.catch_up([9, 4, 9])
    assert (list(counts.token_ids), list(counts.counts)) == ([9, 4], [2, 1])
