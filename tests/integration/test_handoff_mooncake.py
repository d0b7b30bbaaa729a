"""KV between two processes by the real transfer engine, over TCP."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest

from infra.benchmarks.transfer_process import TransferProcess
from infra.local.verbs import VerbsError, ensure_verbs
from schemas.kv_layout import KVLayout
from workers.handoff.mooncake_transport import CALL_TIMEOUT_S
from workers.handoff.write_lane import WriteLimits

LAYOUT = KVLayout(16, "bfloat16", 1, 6, 2, 64)
NUM_BLOCKS = 64
LIMITS = WriteLimits(settle_s=0.1)


@contextmanager
def processes(decode_layout: KVLayout = LAYOUT) -> Iterator[tuple[TransferProcess, TransferProcess]]:
    try:
        env = ensure_verbs(os.environ, print)
    except VerbsError as error:
        pytest.skip(str(error))
    prefill = TransferProcess(LAYOUT, NUM_BLOCKS, env)
    try:
        decode = TransferProcess(decode_layout, NUM_BLOCKS, env)
        try:
            yield prefill, decode
        finally:
            decode.close()
    finally:
        prefill.close()


@pytest.mark.parametrize("block_size", [16, 8, 32])
def test_bytes_arrive_in_another_process(block_size: int) -> None:
    with processes(replace(LAYOUT, block_size=block_size)) as (prefill, decode):
        for seed, num_tokens in enumerate((1, 16, 100, 333)):
            random = Random(seed)
            ours = random.sample(range(NUM_BLOCKS), -(-num_tokens // 16))
            theirs = random.sample(range(NUM_BLOCKS), -(-num_tokens // block_size))
            sent = prefill.fill(ours, num_tokens, seed)
            told = prefill.write(decode, ours, theirs, num_tokens, LIMITS)
            assert told["error"] == ""
            assert told["num_bytes"] == num_tokens * 2 * 64 * 2 * 2 * 6
            assert decode.compare(theirs, num_tokens, told["checks"]) == ("", sent)
        # What was not written since is not taken for what was.
        prefill.fill(ours, num_tokens, 99)
        error, _ = decode.compare(theirs, num_tokens, [{**c, "digest": "00"} for c in told["checks"]])
        assert error.startswith("content: ")


def test_a_process_that_stands_still_fails_a_call_in_time_and_one_that_is_dead_at_once() -> None:
    with processes() as (prefill, decode):
        blocks = list(range(10))
        prefill.fill(blocks, 160, 1)
        assert prefill.write(decode, blocks, blocks, 160, LIMITS)["error"] == ""
        decode.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        told = prefill.write(decode, blocks, blocks, 160, LIMITS)
        assert "transfer engine" in told["error"]
        assert time.monotonic() - began < 3 * CALL_TIMEOUT_S + 2
        decode.process.send_signal(signal.SIGCONT)
        decode.process.kill()
        decode.process.wait()
        began = time.monotonic()
        assert "transfer engine" in prefill.write(decode, blocks, blocks, 160, LIMITS)["error"]
        assert time.monotonic() - began < 3 * CALL_TIMEOUT_S + 2


def test_memory_that_is_not_registered_is_refused_by_its_owner() -> None:
    with processes() as (prefill, decode):
        decode.rank.keys_address -= 1 << 30
        assert "transfer engine" in prefill.write(decode, [1], [1], 16, LIMITS)["error"]
        decode.rank.keys_address += 1 << 30
        sent = prefill.fill([1], 16, 1)
        told = prefill.write(decode, [1], [1], 16, LIMITS)
        assert decode.compare([1], 16, told["checks"]) == ("", sent)
