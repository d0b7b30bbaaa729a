"""The ladder of levels by itself: figures and times in, levels out."""

from hypothesis import given
from hypothesis import strategies as st

from streams.admission.shedding import Ladder, ShedLevel, ShedPolicy, paused
from tests.admission_harness import make_request

POLICY = ShedPolicy()


def settled(wait_ms: int, kv_use: float, ladder: Ladder | None = None, start: int = 0) -> ShedLevel:
    ladder = ladder or Ladder(POLICY)
    for now in range(start, start + 60_000, 100):
        ladder.update(wait_ms, kv_use, now)
    return ladder.level


def test_each_level_has_what_brings_it() -> None:
    assert [settled(wait, 0.0) for wait in (249, 250, 1_000, 2_000, 5_000, 60_000)] == [0, 1, 2, 3, 4, 4]
    # Blocks that are in use while nobody waits hold back batch alone.
    assert [settled(0, use) for use in (0.89, 0.9, 0.97, 1.0)] == [0, 1, 1, 1]
    assert [settled(1, use) for use in (0.89, 0.9, 0.97, 1.0)] == [0, 1, 2, 2]


def test_it_rises_one_step_at_a_time() -> None:
    ladder, levels = Ladder(POLICY), []
    for now in range(0, 2_000, 100):
        ladder.update(10_000, 1.0, now)
        levels.append(ladder.level)
    assert levels == [1, 1, 1, 2, 2, 2, 3, 3, 3, *[4] * 11]


def test_it_falls_one_step_at_a_time_after_calm() -> None:
    ladder = Ladder(POLICY)
    assert settled(5_000, 0.0, ladder) == ShedLevel.REFUSE_FREE
    fell_at = [ms for ms in range(0, 30_000, 100) if ladder.update(0, 0.0, 100_000 + ms)]
    assert fell_at == [3_000, 6_000, 9_000, 12_000]
    assert ladder.level == ShedLevel.NONE


def test_near_a_bound_it_stays_where_it_is() -> None:
    for wait, use in ((250, 0.0), (0, 0.9)):
        ladder = Ladder(POLICY)
        assert settled(wait, use, ladder) == ShedLevel.PAUSE_BATCH
        for n, now in enumerate(range(100_000, 160_000, 100)):
            wobble = (n % 2 * 100, 0.0) if wait else (0, 0.87 + n % 2 * 0.02)
            assert not ladder.update(int(wait - 100 + wobble[0]) if wait else 0, wobble[1], now)


@given(st.lists(st.tuples(st.integers(0, 8_000), st.floats(0, 1), st.integers(0, 1_000)), max_size=200))
def test_it_never_skips_a_level_nor_leaves_one_soon(steps: list[tuple[int, float, int]]) -> None:
    ladder, now, changed_at = Ladder(POLICY), 0, -POLICY.hold_ms
    rose_at = -POLICY.step_ms
    for wait, use, ms in steps:
        now += ms
        before = ladder.level
        if ladder.update(wait, use, now):
            assert abs(ladder.level - before) == 1
            if ladder.level > before:
                assert now - rose_at >= POLICY.step_ms
                rose_at = now
            else:
                assert now - changed_at >= POLICY.hold_ms
            changed_at = now
        else:
            assert ladder.level == before


@given(
    level=st.sampled_from(list(ShedLevel)[1:]),
    steps=st.lists(
        st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 5_000)), min_size=1, max_size=100
    ),
)
def test_between_what_brings_a_level_and_what_ends_it_nothing_changes(
    level: ShedLevel, steps: list[tuple[float, float, int]]
) -> None:
    """Waits anywhere from half of what brought the level up to what brings the next one, KV use up to what
    brings the level by itself: however it swings there, and however long, the level stays."""
    rises = (*POLICY.rise_wait_ms, 1_000_000)
    low, high = round(POLICY.fall * rises[level - 1]), rises[level] - 1
    most_use = POLICY.rise_kv_use[-1] if level >= ShedLevel.CAP_FREE else POLICY.rise_kv_use[0]
    ladder, now = Ladder(POLICY), 60_000
    assert settled(rises[level - 1], 0.0, ladder) is level
    for wait_part, use_part, ms in steps:
        now += ms
        wait_ms = low + round(wait_part * (high - low))
        assert not ladder.update(wait_ms, use_part * most_use, now)
    assert ladder.level is level


def test_batch_is_paused_but_for_retries() -> None:
    assert paused(ShedLevel.PAUSE_BATCH, make_request(priority=2))
    assert not paused(ShedLevel.NONE, make_request(priority=2))
    assert not paused(ShedLevel.REFUSE_FREE, make_request(priority=2, attempt=2))
    assert not paused(ShedLevel.REFUSE_FREE, make_request(priority=1))
