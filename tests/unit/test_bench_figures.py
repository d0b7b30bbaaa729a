"""What benchmarks compute from what they measured."""

from pathlib import Path

import pytest

from infra.benchmarks.long_prompts import summarize
from infra.benchmarks.machine import CpuTimes, cpu_times
from infra.benchmarks.side_by_side import Figures, compare
from infra.benchmarks.sse_client import StreamTimes


def test_the_best_round_counts_and_says_what_others_used_in_it() -> None:
    figures = Figures()
    for speed, ttft, share in ((10.0, 400.0, 0.5), (12.0, 300.0, 0.1), (11.0, 350.0, 0.0)):
        figures.add({"b1": speed, "http_8x481_ttft": ttft}, share)
    assert figures.best() == {"b1": 12.0, "http_8x481_ttft": 300.0}
    assert figures.foreign_shares() == {"b1": 0.1, "http_8x481_ttft": 0.1}


def test_ratios_are_ours_by_theirs_for_what_both_have() -> None:
    ours, theirs = Figures(), Figures()
    assert compare(ours, theirs) is None
    ours.add({"prefill_512": 1000.0, "b8": 100.0, "http_8x481_ttft": 1500.0}, 0.0)
    assert compare(ours, theirs) is None
    theirs.add({"prefill_512": 500.0, "http_8x481_ttft": 3000.0}, 0.0)
    assert compare(ours, theirs) == {"prefill_512": 2.0, "http_8x481_ttft": 0.5}


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        (CpuTimes(0, 0, 0), CpuTimes(10, 8, 6), 0.2),
        (CpuTimes(5, 5, 1), CpuTimes(15, 5, 1), 0.0),
        (CpuTimes(0, 0, 0), CpuTimes(10, 5, 5.1), 0.0),  # ticks are rounded
        (CpuTimes(3, 2, 1), CpuTimes(3, 2, 1), 0.0),
    ],
)
def test_what_is_not_ours_is_foreign(before: CpuTimes, after: CpuTimes, share: float) -> None:
    assert after.foreign_share_since(before) == pytest.approx(share)


def test_own_time_is_that_of_the_whole_family_with_the_dead(tmp_path: Path) -> None:
    def process(pid: int, parent: int, *ticks: int) -> None:
        (tmp_path / str(pid)).mkdir()
        fields = ["S", str(parent), *["0"] * 9, *map(str, ticks), "20", "0"]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) name) {' '.join(fields)}\n")

    (tmp_path / "stat").write_text("cpu  100 20 30 4000 50 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    process(1, 0, 5000, 5000, 5000, 5000)
    process(10, 1, 100, 50, 30, 20)  # with two hundred ticks of children that ended
    process(11, 10, 10, 0, 0, 0)
    process(12, 11, 0, 7, 0, 0)
    process(20, 1, 999, 999, 0, 0)
    times = cpu_times(10, tmp_path)
    assert times == CpuTimes(total=42.21, busy=1.71, own=2.17)
    assert cpu_times(77, tmp_path).own == 0


def stream(first: float, last: float, tokens: tuple[int, int] = (481, 32)) -> StreamTimes:
    return StreamTimes(sent_at=1.0, token_at=[first, last], input_tokens=tokens[0], output_tokens=tokens[1])


def test_long_prompts_count_from_the_first_request_to_the_last_token() -> None:
    figures = summarize([stream(2.0, 3.0), stream(3.0, 5.0), stream(4.0, 4.5)], began=1.0)
    assert figures.tok_s == 3 * 32 / 4
    assert figures.ttft_ms == pytest.approx(2000)
    with pytest.raises(RuntimeError, match="480 tokens in and 32 out instead of 481 and 32"):
        summarize([stream(2.0, 3.0, tokens=(480, 32))], began=1.0)
