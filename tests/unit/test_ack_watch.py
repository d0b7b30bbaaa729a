"""Which worker gives up: one whose client hangs, and none whose broker is away."""

from hypothesis import given
from hypothesis import strategies as st

from workers.ack_watch import AckWatch

TICK_S = 0.1


class Desk:
    def __init__(self) -> None:
        self.now = 1_000.0
        self.watch = AckWatch(self.now)

    def wait(self, seconds: float, put_at: float | None, *, answers: bool = True) -> float:
        """Returns what was waited at the end."""
        waited = 0.0
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            age = 0.0 if put_at is None else self.now - put_at
            waited = self.watch.waited(age, answers, self.now)
        return waited


def test_a_record_ages_while_the_broker_answers_and_not_while_it_is_away() -> None:
    desk = Desk()
    put_at = desk.now + 0.05
    assert abs(desk.wait(5, put_at) - 4.95) < 0.01
    assert abs(desk.wait(3_600, put_at, answers=False) - 4.95) < 0.01
    assert abs(desk.wait(10, put_at) - 14.95) < 0.01


def test_one_that_was_put_while_the_broker_was_away_begins_when_it_is_back() -> None:
    desk = Desk()
    desk.wait(10, None)
    put_at = desk.now
    assert desk.wait(600, put_at, answers=False) == 0.0
    assert abs(desk.wait(2, put_at) - 2) < 0.01


def test_the_next_one_is_not_as_old_as_the_one_before() -> None:
    desk = Desk()
    first = desk.now
    assert desk.wait(200, first) > 199
    second = desk.now - 50
    # It was put while the first one waited: what it waited behind that one is not its own.
    assert desk.wait(0.1, second) < 0.2
    assert desk.wait(1, None) == 0.0
    assert desk.wait(1, desk.now) < 1.01


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.booleans()), max_size=30))
def test_nothing_is_ever_thought_older_than_it_is_or_than_the_broker_answered(
    spans: list[tuple[bool, int, bool]],
) -> None:
    desk, put_at, answered = Desk(), None, 0.0
    for acked, ticks, answers in spans:
        if acked or put_at is None:
            put_at, answered = desk.now, 0.0
        waited = desk.wait(ticks * TICK_S, put_at, answers=answers)
        answered += ticks * TICK_S if answers else 0.0
        if ticks:
            assert waited <= min(desk.now - put_at, answered) + 0.01
