"""What the peer's programs print, as recorded on a machine of the project; some fields left out."""

from pathlib import Path

import pytest

from infra.benchmarks.llama_cpp import LlamaCpp, PeerError, parse_batched_bench, parse_bench

BENCH = """[
  {
    "build_commit": "unknown",
    "cpu_info": "Intel(R) Xeon(R) Processor",
    "backends": "CPU",
    "model_type": "gemma3 270M Q4_K - Medium",
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 2,
    "flash_attn": -1,
    "n_prompt": 512,
    "n_gen": 0,
    "n_depth": 0,
    "test_time": "2026-11-29T23:36:38Z",
    "avg_ns": 1016834212,
    "stddev_ns": 67907497,
    "avg_ts": 504.969396,
    "stddev_ts": 32.474237,
    "samples_ns": [ 976193682, 979079623, 1095229331 ],
    "samples_ts": [ 524.486, 522.94, 467.482 ]
  },
  {
    "n_prompt": 0,
    "n_gen": 32,
    "n_depth": 240,
    "samples_ts": [ 40.2837, 40.6943, 37.5713 ]
  }
]
"""
BATCHED = """
{"n_threads": 2, "pp": 240, "tg": 32, "pl": 1, "n_kv": 272, "t_tg": 0.843509, "speed_tg": 37.936760}
{"n_threads": 2, "pp": 240, "tg": 32, "pl": 8, "n_kv": 2176, "t_tg": 1.986122, "speed_tg": 128.894394}
{"n_threads": 2, "pp": 240, "tg": 32, "pl": 32, "n_kv": 8704, "t_tg": 5.169862, "speed_tg": 198.071060}

"""


def test_the_best_sample_of_the_test_that_was_asked_for_counts() -> None:
    assert parse_bench(BENCH, num_prompt=512, num_gen=0) == 524.486
    assert parse_bench(BENCH, num_prompt=0, num_gen=32) == 40.6943


def test_batches_are_found_by_their_size_among_other_lines() -> None:
    speeds = parse_batched_bench(BATCHED, (1, 8, 32), num_prompt=240, num_gen=32)
    assert speeds == {1: 37.93676, 8: 128.894394, 32: 198.07106}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not understood"),
        ("[]", "no test of 512 prompt and 0 generated tokens"),
        ('[{"n_prompt": 512, "n_gen": 0}]', "not understood .'samples_ts'."),
        ('[{"n_prompt": 512, "n_gen": 0, "samples_ts": []}]', "not understood"),
        ('{"error": "x"}', "not understood"),
    ],
)
def test_other_output_of_the_bench_is_an_error_that_shows_it(text: str, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        parse_bench(text, num_prompt=512, num_gen=0)


def test_a_batch_that_was_left_out_or_is_garbled_is_an_error() -> None:
    with pytest.raises(PeerError, match=r"no figures for batches of \[64\]"):
        parse_batched_bench(BATCHED, (32, 64), num_prompt=240, num_gen=32)
    with pytest.raises(PeerError, match="no figures"):
        parse_batched_bench(BATCHED, (32,), num_prompt=241, num_gen=32)
    with pytest.raises(PeerError, match="not understood"):
        parse_batched_bench('{"pp": 240, "tg', (1,), num_prompt=240, num_gen=32)


def program(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_batched_bench_is_looked_for_beside_the_bench(tmp_path: Path) -> None:
    bench = program(tmp_path / "llama-bench")
    assert LlamaCpp.at(tmp_path / "w", 2, None, bench).batched_bench is None
    batched = program(tmp_path / "llama-batched-bench")
    assert LlamaCpp.at(tmp_path / "w", 2, None, bench).batched_bench == batched
    assert LlamaCpp.at(tmp_path / "w", 2, None, None).batched_bench is None


def test_a_path_that_is_no_program_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="llama-server is not a program"):
        LlamaCpp.at(tmp_path / "w", 2, tmp_path / "llama-server", None)


async def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    bench = program(tmp_path / "llama-bench")
    bench.write_text("#!/bin/sh\necho 'no such model' >&2\nexit 3\n")
    with pytest.raises(PeerError, match=r"(?s)llama-bench failed with status 3.*no such model"):
        await LlamaCpp.at(tmp_path / "w", 2, None, bench).prefill(512)
