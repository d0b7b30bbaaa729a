import pytest

from infra.benchmarks.scheduler import scheduler_cost


def test_the_line_goes_through_what_was_measured() -> None:
    cost = scheduler_cost((1, 5))
    assert set(cost.us_by_batch_size) == {1, 5}
    for size, us in cost.us_by_batch_size.items():
        assert us > 0
        assert cost.us_per_step + size * cost.us_per_sequence == pytest.approx(us)
