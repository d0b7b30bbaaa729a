import contextlib

import pytest

from gateway.in_flight import BodyBudget, InFlight, caller
from schemas.api.errors import ApiError


def refused(flight: InFlight, key: bytes) -> str | None:
    try:
        with flight.one(key):
            return None
    except ApiError as error:
        return f"{error.status} {error.code} {error.retry_after_s()}"


def test_a_key_and_all_keys_have_a_limit_and_what_ended_does_not_count() -> None:
    flight = InFlight(most=3, most_per_key=2)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as others:
        first.enter_context(flight.one(b"a"))
        others.enter_context(flight.one(b"a"))
        assert refused(flight, b"a") == "503 too_many_streams_of_key 1"
        others.enter_context(flight.one(b"b"))
        assert refused(flight, b"c") == "503 too_many_streams 1"
        first.close()
        assert refused(flight, b"a") is None
        assert refused(flight, b"c") is None
        assert flight.count == 2
    assert flight.count == 0


def test_a_request_that_fails_is_over() -> None:
    flight = InFlight(most=1, most_per_key=1)
    with pytest.raises(RuntimeError), flight.one(b"a"):
        raise RuntimeError
    assert refused(flight, b"a") is None


def test_who_calls_is_told_by_the_key_or_by_the_token_in_the_url() -> None:
    keys = [
        caller({b"authorization": b"Bearer a"}, b"token=x"),
        caller({b"authorization": b"Bearer b"}, b""),
        caller({b"x-api-key": b"a"}, b""),
        caller({}, b"token=x"),
        caller({}, b""),
    ]
    assert len(set(keys)) == len(keys)
    assert caller({b"x-api-key": b"a"}, b"token=x") == keys[2]


def test_bodies_share_a_budget_and_give_back_what_they_took() -> None:
    budget = BodyBudget(10)
    with budget.one() as take:
        take(6)
        with budget.one() as other:
            other(3)
            with pytest.raises(ApiError) as refusal:
                other(2)
        assert (refusal.value.status, refusal.value.code) == (503, "too_many_bodies")
        assert budget.held == 6
        take(4)
    assert budget.held == 0
