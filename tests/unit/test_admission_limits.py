from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import ClassLimits, RateLimit, Tenant
from streams.admission.limits import REMEMBER_SETTLED_MS, Limits
from streams.admission.token_bucket import MAX_SEGMENTS, TokenBucket

MINUTE = 60_000
T0 = 1_700_000_000_000


def rid(n: int) -> bytes:
    return n.to_bytes(16, "big")


def with_limits(**fields: int) -> Limits:
    limits = Limits()
    limits.set_tenant(Tenant("demo", 0, [], [ClassLimits(0, **fields)]), T0)
    return limits


def reserve(
    limits: Limits, n: int, tokens: int, now: int = T0, attempt: int = 1, end_ms: int = 600_000
) -> int:
    """The status: 0 where it was reserved."""
    refusal = limits.reserve(rid(n), attempt, "demo", 0, tokens // 3, tokens - tokens // 3, now + end_ms, now)
    return 0 if refusal is None else refusal.status


def settle(limits: Limits, n: int, used: int, now: int = T0) -> None:
    limits.settle(rid(n), "demo", 0, used // 2, used - used // 2, now, now)


def test_tells_how_long_until_the_refill_suffices() -> None:
    limits = with_limits(tokens_per_minute=600)
    assert reserve(limits, 1, 600) == 0
    refusal = limits.reserve(rid(2), 1, "demo", 0, 40, 60, T0 + MINUTE, T0)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (429, "token_rate_exceeded")
    assert refusal.retry_after_ms == 10_000  # 100 tokens at 10 a second
    assert reserve(limits, 2, 100, T0 + 9_999) == 429
    assert reserve(limits, 2, 100, T0 + 10_000) == 0


def test_what_was_not_used_can_be_reserved_at_once() -> None:
    limits = with_limits(tokens_per_minute=600)
    assert reserve(limits, 1, 600) == 0
    settle(limits, 1, 20)
    assert reserve(limits, 2, 580) == 0
    assert reserve(limits, 3, 1) == 429


def test_gives_nothing_back_that_the_refill_has_given_already() -> None:
    limits = with_limits(tokens_per_minute=600)
    assert reserve(limits, 1, 600) == 0
    later = T0 + MINUTE  # full again, with the first reservation still open
    assert reserve(limits, 2, 600, later) == 0
    settle(limits, 1, 0, later)
    assert reserve(limits, 3, 1, later) == 429


def test_a_request_above_the_bucket_is_refused_for_good() -> None:
    refusal = with_limits(tokens_per_minute=600).reserve(rid(1), 1, "demo", 0, 1, 600, T0 + MINUTE, T0)
    assert refusal is not None
    assert (refusal.status, refusal.code) == (400, "tokens_per_minute_exceeded")
    assert refusal.retry_after_ms is None


def test_counts_requests_per_minute() -> None:
    limits = with_limits(requests_per_minute=2)
    assert [reserve(limits, n, 1) for n in range(3)] == [0, 0, 429]
    assert reserve(limits, 3, 1, T0 + 29_999) == 429
    assert reserve(limits, 3, 1, T0 + 30_000) == 0


def test_counts_requests_at_once() -> None:
    limits = with_limits(max_concurrent_requests=2)
    assert [reserve(limits, n, 1) for n in range(3)] == [0, 0, 429]
    settle(limits, 0, 1)
    assert reserve(limits, 3, 1) == 0
    limits.expire(T0 + 600_000)
    assert limits.num_concurrent("demo", 0) == 0


def test_counts_input_and_output_apart() -> None:
    limits = with_limits(input_tokens_per_minute=600, output_tokens_per_minute=60)

    def asked(n: int, input_tokens: int, output_tokens: int, now: int = T0) -> tuple[int, str, int | None]:
        refusal = limits.reserve(rid(n), 1, "demo", 0, input_tokens, output_tokens, now + MINUTE, now)
        return (0, "", None) if refusal is None else (refusal.status, refusal.message, refusal.retry_after_ms)

    assert asked(1, 500, 10)[0] == 0
    assert asked(2, 101, 10) == (429, "the limit is 600 input tokens per minute", 100)
    assert asked(3, 1, 51) == (429, "the limit is 60 output tokens per minute", 1_000)
    assert asked(4, 101, 51) == (429, "the limit is 60 output tokens per minute", 1_000)  # the longer wait
    assert asked(5, 1, 61)[0] == 400
    limits.settle(rid(1), "demo", 0, 500, 4, T0, T0)
    assert asked(6, 100, 56) == (0, "", None)
    assert [(limit.name, limit.remaining, limit.reset_ms) for limit in limits.rate_limits("demo", 0, T0)] == [
        ("input_tokens", 0, MINUTE),
        ("output_tokens", 0, MINUTE),
    ]


def test_tells_what_is_left_of_the_limits_there_are() -> None:
    limits = with_limits(tokens_per_minute=600, requests_per_minute=3, max_concurrent_requests=9)
    assert limits.rate_limits("other", 0, T0) == limits.rate_limits("demo", 1, T0) == []
    assert reserve(limits, 1, 100) == 0
    assert limits.rate_limits("demo", 0, T0) == [
        RateLimit("requests", 3, 2, 20_000),
        RateLimit("tokens", 600, 500, 10_000),
    ]
    settle(limits, 1, 40)
    assert limits.rate_limits("demo", 0, T0 + 1_000)[1] == RateLimit("tokens", 600, 570, 3_000)


def test_a_refused_request_takes_nothing() -> None:
    limits = with_limits(tokens_per_minute=100, requests_per_minute=2)
    assert reserve(limits, 1, 60) == 0
    assert reserve(limits, 2, 60) == 429
    assert reserve(limits, 3, 40) == 0


def test_a_retry_reserves_nothing_new() -> None:
    limits = with_limits(tokens_per_minute=100, max_concurrent_requests=1)
    assert reserve(limits, 1, 100) == 0
    assert reserve(limits, 1, 100, attempt=2) == 0
    assert limits.num_concurrent("demo", 0) == 1
    assert reserve(limits, 9, 100, attempt=2) == 0  # reserved by another process
    assert limits.reserved_tokens("demo", 0) == 100


def test_a_retry_after_a_usage_row_is_charged_for_the_difference() -> None:
    limits = with_limits(tokens_per_minute=100)
    assert reserve(limits, 1, 80) == 0
    settle(limits, 1, 30)
    assert reserve(limits, 1, 80, attempt=2) == 0
    settle(limits, 1, 50)
    assert limits.num_concurrent("demo", 0) == 0
    assert reserve(limits, 2, 51) == 429
    assert reserve(limits, 2, 50) == 0


def test_rows_that_come_twice_or_in_the_wrong_order_charge_the_largest_once() -> None:
    limits = with_limits(tokens_per_minute=100)
    assert reserve(limits, 1, 80) == 0
    for used in (40, 30, 40, 10):
        settle(limits, 1, used)
    assert reserve(limits, 2, 61) == 429
    assert reserve(limits, 2, 60) == 0


def test_usage_of_another_process_is_charged_as_of_when_it_ended() -> None:
    limits = with_limits(tokens_per_minute=600)
    limits.settle(rid(1), "demo", 0, 200, 400, T0 - 30_000, T0)
    limits.settle(rid(1), "demo", 0, 200, 400, T0 - 30_000, T0)
    assert reserve(limits, 2, 301) == 429
    assert reserve(limits, 2, 300) == 0


def test_release_gives_all_back_and_forgets() -> None:
    limits = with_limits(tokens_per_minute=100)
    assert reserve(limits, 1, 100) == 0
    limits.release(rid(1), T0)
    limits.release(rid(1), T0)
    assert reserve(limits, 1, 100) == 0


def test_what_expires_stays_charged() -> None:
    limits = with_limits(tokens_per_minute=600)
    assert reserve(limits, 1, 600, end_ms=10) == 0
    limits.expire(T0 + 10)
    assert limits.reserved_tokens("demo", 0) == 0
    assert reserve(limits, 2, 10, T0 + 10) == 429


def test_changed_limits_are_in_force_at_once() -> None:
    limits = with_limits(tokens_per_minute=100)
    assert reserve(limits, 1, 100) == 0
    limits.set_tenant(Tenant("demo", 0, [], [ClassLimits(0, tokens_per_minute=150)]), T0)
    assert reserve(limits, 2, 51) == 429
    assert reserve(limits, 2, 50) == 0
    limits.set_tenant(Tenant("demo", 0, [], []), T0)
    assert reserve(limits, 3, 10**9) == 0
    limits.set_tenant(Tenant("demo", 0, [], [ClassLimits(0, tokens_per_minute=10)]), T0)
    settle(limits, 1, 0)  # was taken from a bucket that is no more
    assert reserve(limits, 4, 10) == 0
    assert reserve(limits, 5, 1) == 429


def test_classes_and_tenants_have_limits_of_their_own() -> None:
    limits = with_limits(max_concurrent_requests=1)
    assert reserve(limits, 1, 1) == 0
    assert limits.reserve(rid(2), 1, "demo", 1, 1, 1, T0 + MINUTE, T0) is None
    assert limits.reserve(rid(3), 1, "other", 0, 1, 1, T0 + MINUTE, T0) is None
    assert reserve(limits, 4, 1) == 429


def test_memory_is_bounded_though_ends_lie_a_day_ahead() -> None:
    limits = with_limits(tokens_per_minute=10**9)
    for n in range(20_000):
        now = T0 + n * 10
        assert reserve(limits, n, 10, now, end_ms=86_400_000) == 0
        settle(limits, n, 10, now)
        limits.expire(now)
    assert limits.num_remembered() <= REMEMBER_SETTLED_MS // 10 + 1
    assert len(limits._ends) <= 1_100


@dataclass
class Taken:
    at: int
    reserved: int
    used: int


# Steps of (time since the last, what to do, how much): reserve, settle the n-th open one, let expire.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 20_000),
        st.sampled_from(["reserve", "reserve", "settle", "settle_twice", "release", "tick"]),
        st.integers(1, 120),
        st.integers(0, 1_000),
    ),
    max_size=60,
)


@given(STEPS)
def test_tokens_used_in_any_window_stay_below_capacity_and_refill(
    steps: list[tuple[int, str, int, int]],
) -> None:
    capacity = 100
    limits = with_limits(tokens_per_minute=capacity)
    now, taken, open_ids = T0, dict[int, Taken](), list[int]()
    for n, (wait, what, amount, pick) in enumerate(steps):
        now += wait
        limits.expire(now)
        if what == "reserve":
            status = reserve(limits, n, amount, now)
            assert status == 400 if amount > capacity else status in (0, 429)
            if status == 0:
                taken[n] = Taken(now, amount, amount)
                open_ids.append(n)
        elif what != "tick" and open_ids:
            chosen = open_ids.pop(pick % len(open_ids))
            entry = taken[chosen]
            if what == "release":
                limits.release(rid(chosen), now)
                entry.used = 0
            else:
                entry.used = min(entry.reserved, amount)
                settle(limits, chosen, entry.used, now)
                if what == "settle_twice":
                    settle(limits, chosen, entry.used, now)
        assert limits.reserved_tokens("demo", 0) == sum(taken[i].reserved for i in open_ids)
        assert limits.num_concurrent("demo", 0) == len(open_ids)
    # Until it is settled a request may use all it reserved, so this holds at every moment, not only now.
    events = sorted(taken.values(), key=lambda entry: entry.at)
    for i, first in enumerate(events):
        used = 0
        for entry in events[i:]:
            used += entry.used
            assert used <= capacity + (entry.at - first.at) * capacity / MINUTE + 1e-6
    # Nothing leaks: with the last end passed nothing is reserved, later nothing is remembered.
    limits.expire(now + 600_000)
    assert limits.reserved_tokens("demo", 0) == 0
    assert limits.num_concurrent("demo", 0) == 0
    limits.expire(now + 600_000 + REMEMBER_SETTLED_MS)
    assert limits.num_remembered() == 0
    assert reserve(limits, 10_000, capacity, now + 2_000_000) == 0


class ExactBucket:
    """The definition: the level is what replaying all takes, each with what it came to, would leave."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.takes: dict[int, tuple[int, float]] = {}  # mark: (when, what it came to)

    def level(self, now: int) -> float:
        level, at = float(self.capacity), 0
        for when, amount in [*self.takes.values(), (now, 0.0)]:
            level = min(self.capacity, level + (when - at) * self.capacity / MINUTE) - amount
            at = when
        return level


BUCKET_STEPS = st.lists(
    st.tuples(st.integers(0, 30_000), st.booleans(), st.integers(1, 100), st.integers(0, 999)), max_size=80
)


@given(BUCKET_STEPS)
def test_give_back_leaves_the_level_of_a_replay_with_the_smaller_amount(
    steps: list[tuple[int, bool, int, int]],
) -> None:
    bucket, exact, now, marks = TokenBucket(100), ExactBucket(100), 0, list[int]()
    bucket.advance(0)
    for wait, take, amount, pick in steps:
        now += wait
        if take:
            mark = bucket.take(amount, now)
            marks.append(mark)
            exact.takes[mark] = (now, amount)
        elif marks:
            mark = marks.pop(pick % len(marks))
            when, was = exact.takes[mark]
            bucket.give_back(mark, min(amount, was), now)
            exact.takes[mark] = (when, max(0, was - amount))
        bucket.advance(now)
        assert bucket.level == pytest.approx(exact.level(now), abs=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(0, 2_000), st.integers(1, 20), st.floats(0, 1)), min_size=200, max_size=400
    )
)
def test_merged_history_never_gives_back_more_than_a_replay(steps: list[tuple[int, int, float]]) -> None:
    bucket, exact, now = TokenBucket(100), ExactBucket(100), 0
    bucket.advance(0)
    marks = []
    for wait, amount, _ in steps:
        now += wait
        mark = bucket.take(amount, now)
        marks.append(mark)
        exact.takes[mark] = (now, amount)
    assert len(bucket._starts) <= MAX_SEGMENTS
    for mark, (_, amount, share) in zip(marks, steps, strict=True):
        bucket.give_back(mark, amount * share, now)
        exact.takes[mark] = (exact.takes[mark][0], amount * (1 - share))
    assert bucket.level <= exact.level(now) + 1e-6
