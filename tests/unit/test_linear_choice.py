"""How matrices are multiplied: what is chosen from timings, and what becomes of a timing that hangs."""

import os
import sys
import time
from pathlib import Path

import pytest

from workers.models import linear_choice
from workers.models.fast_linear import ROW_BUCKETS, LinearKind, row_bucket, same_kind
from workers.models.linear_choice import choose_kinds, choose_linears
from workers.models.linear_timing import is_hopeless

SHAPES = [(64, 64), (96, 128)]
INT8, ONEDNN, WEIGHT_ONLY, BF16 = (
    LinearKind.INT8,
    LinearKind.INT8_ONEDNN,
    LinearKind.WEIGHT_ONLY,
    LinearKind.BF16,
)


def test_rows_fall_into_buckets() -> None:
    assert [row_bucket(count) for count in (1, 2, 8, 9, 32, 33, 512, 4096)] == [0, 1, 1, 2, 2, 3, 3, 3]


def test_int8_is_kept_unless_another_is_much_faster() -> None:
    seconds = {INT8: [1.0, 1.0, 1.0, 1.0], BF16: [0.9, 0.5, 2.0, 0.7], ONEDNN: [2.0, 2.0, 0.9, 0.4]}
    assert choose_kinds(seconds) == (INT8, BF16, INT8, ONEDNN)


def test_without_int8_the_fastest_is_taken_and_bf16_where_nothing_is_known() -> None:
    assert choose_kinds({BF16: [1.0] * 4, WEIGHT_ONLY: [0.9, 0.9, 3.0, 3.0]}) == (
        WEIGHT_ONLY,
        WEIGHT_ONLY,
        BF16,
        BF16,
    )
    assert choose_kinds({}) == same_kind(BF16)


@pytest.mark.parametrize("mode", ["weight_only", "bf16"])
def test_what_is_asked_for_is_not_timed(mode: str, tmp_path: Path) -> None:
    choice = choose_linears(mode, SHAPES, tmp_path)
    assert all(choice(*shape) == same_kind(LinearKind(mode)) for shape in SHAPES)
    assert not list(tmp_path.iterdir())


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one of auto, int8, weight_only, bf16, got 'int4'"):
        choose_linears("int4", SHAPES, tmp_path)


def test_int8_is_refused_where_nothing_multiplies_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's reference code would take minutes for a prompt."""
    monkeypatch.setattr(linear_choice, "supports_panels", lambda *shape: False)
    monkeypatch.setattr(linear_choice, "ONEDNN_HAS_INT8", False)
    with pytest.raises(
        ValueError, match="int8 needs AVX-512 or AVX-VNNI, which this processor lacks: use auto"
    ):
        choose_linears("int8", SHAPES, tmp_path)
    monkeypatch.setattr(linear_choice, "ONEDNN_HAS_INT8", True)
    assert choose_linears("int8", SHAPES, tmp_path)(64, 64) == same_kind(ONEDNN)


def fake_timing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    """Lets `program` run where the timing would, under the interpreter that the tests run under."""
    script = tmp_path / "bin" / "timing.py"
    script.parent.mkdir()
    script.write_text(program)
    monkeypatch.setattr(linear_choice, "TIMING_COMMAND", (sys.executable, str(script)))


LINE = '{{"kind": "{}", "shape": "64x64", "seconds": [{}]}}'


def test_a_timing_that_hangs_is_killed_and_what_it_said_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [LINE.format("weight_only", "1, 1, 5, 5"), LINE.format("bf16", "2, 2, 2, 2")]
    program = f"import time\nprint({lines[0]!r})\nprint({lines[1]!r}, flush=True)\ntime.sleep(60)"
    fake_timing(monkeypatch, tmp_path, program)
    monkeypatch.setattr(linear_choice, "SILENCE_S", 0.5)
    choice = choose_linears("auto", SHAPES, tmp_path)
    assert choice(64, 64) == (WEIGHT_ONLY, WEIGHT_ONLY, BF16, BF16)
    assert choice(96, 128) == same_kind(BF16)
    # The next start tries again.
    assert not list(tmp_path.glob("linear-*"))


def test_a_whole_timing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = ", ".join("1" for _ in ROW_BUCKETS)
    fake_timing(monkeypatch, tmp_path, f"print({LINE.format('weight_only', times)!r})")
    assert choose_linears("auto", SHAPES, tmp_path)(64, 64) == same_kind(WEIGHT_ONLY)
    fake = tmp_path / "bin" / "timing.py"
    fake.write_text("raise SystemExit('it must not run again')")
    assert choose_linears("auto", SHAPES, tmp_path)(64, 64) == same_kind(WEIGHT_ONLY)
    # However old it is.
    (kept,) = tmp_path.glob("linear-*")
    os.utime(kept, (0, 0))
    assert choose_linears("auto", SHAPES, tmp_path)(64, 64) == same_kind(WEIGHT_ONLY)
    # A file that is not whole is as good as none.
    kept.write_text('[{"shape": [64')
    fake.write_text(f"print({LINE.format('bf16', times)!r})")
    assert choose_linears("auto", SHAPES, tmp_path)(64, 64) == same_kind(BF16)


def test_what_a_timing_said_of_all_shapes_before_it_hung_is_kept_for_a_day(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = LINE.format("weight_only", "1, 1, 5, 5")
    lines = f"{line}\n{line.replace('64x64', '96x128')}"
    fake_timing(monkeypatch, tmp_path, f"import time\nprint({lines!r}, flush=True)\ntime.sleep(60)")
    monkeypatch.setattr(linear_choice, "SILENCE_S", 0.5)
    assert choose_linears("auto", SHAPES, tmp_path)(96, 128) == same_kind(WEIGHT_ONLY)
    (tmp_path / "bin" / "timing.py").write_text(f"print({LINE.format('bf16', '1, 1, 1, 1')!r})")
    assert choose_linears("auto", SHAPES, tmp_path)(64, 64) == same_kind(WEIGHT_ONLY)
    (kept,) = tmp_path.glob("linear-*")
    yesterday = time.time() - 24 * 3600 - 60
    os.utime(kept, (yesterday, yesterday))
    assert choose_linears("auto", SHAPES, tmp_path)(64, 64) == same_kind(BF16)


def test_the_best_of_several_timings_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [
        LINE.format("bf16", "4, 1, 1, 1"),
        LINE.format("weight_only", "2, 2, 9, 9"),
        LINE.format("bf16", "1, 4, 4, 4"),
    ]
    fake_timing(monkeypatch, tmp_path, f"print({chr(10).join(lines)!r})")
    assert linear_choice.measure(SHAPES) == (
        {(64, 64): {BF16: [1, 1, 1, 1], WEIGHT_ONLY: [2, 2, 9, 9]}},
        True,
    )


def test_what_is_ten_times_slower_for_all_rows_is_not_timed_again() -> None:
    seconds = {
        BF16: [1.0, 1.0, 1.0, 1.0],
        ONEDNN: [11.0, 11.0, 11.0, 11.0],
        WEIGHT_ONLY: [11.0, 2.0, 0.5, 1.0],
    }
    assert [is_hopeless(kind, seconds) for kind in seconds] == [False, True, False]


def test_this_machine_is_timed(tmp_path: Path) -> None:
    """The real thing on small matrices. bf16 and weight-only products are everywhere."""
    timings, complete = linear_choice.measure(SHAPES)
    assert complete
    for shape in SHAPES:
        assert {BF16, WEIGHT_ONLY} <= set(timings[shape])
        assert all(len(seconds) == len(ROW_BUCKETS) for seconds in timings[shape].values())
        assert all(0 < each < 10 for seconds in timings[shape].values() for each in seconds)
