"""What the peer's programs print, as recorded; numbers as they came."""

from pathlib import Path

import pytest

from infra.benchmarks.llama_cpp import LlamaCpp, PeerError, parse_batched_bench, parse_bench

BENCH = """[
  {
    "build_commit": "unknown",
    "build_number": 0,
    "backends": "CPU",
    "model_type": "gemma3 270M Q4_K - Medium",
    "n_threads": 2,
    "n_prompt": 512,
    "n_gen": 0,
    "n_depth": 0,
    "avg_ns": 1027811223,
    "avg_ts": 498.145421,
    "samples_ns": [ 1031337713, 1024284733 ],
    "samples_ts": [ 496.443, 499.861 ]
  },
  {
    "n_prompt": 0,
    "n_gen": 32,
    "avg_ts": 50.1,
    "samples_ts": [ 49.9, 50.3 ]
  }
]
"""
ROW = (
    '{"n_kv_max": 32768, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, '
    '"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 240, "tg": 32, "pl": %d, "n_kv": %d, '
    '"t_pp": 0.52, "speed_pp": 459.066542, "t_tg": 0.664700, "speed_tg": %f, "t": 1.187500, "speed": 229.05}'
)
BATCHED = "\n".join(
    ["", ROW % (1, 272, 48.14), ROW % (8, 2176, 140.5), ROW % (32, 8704, 201.25), "", "llama_perf"]
)


def test_the_best_sample_of_the_test_that_was_asked_for_counts() -> None:
    assert parse_bench(BENCH, num_prompt=512, num_gen=0) == 499.861
    assert parse_bench(BENCH, num_prompt=0, num_gen=32) == 50.3


def test_batches_are_found_by_their_size_among_other_lines() -> None:
    speeds = parse_batched_bench(BATCHED, (1, 8, 32), num_prompt=240, num_gen=32)
    assert speeds == {1: 48.14, 8: 140.5, 32: 201.25}


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
