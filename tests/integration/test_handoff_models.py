"""Real small models in two engines: a prompt of one goes on in the other as if it had never left."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.priority import PriorityClass
from schemas.records import InferenceRequest, SamplingParams
from tests.decoder_files import make_prompt
from tests.handoff_pair import Pair, until
from tests.integration.test_decoder_engine import load
from tests.small_model import make_model
from tests.worker_harness import make_inference_request
from workers.batch import ScheduledSequence, SchedulerOutput
from workers.engine import Engine
from workers.handoff.kv_runner import kv_pool_of
from workers.request import Request

LENGTHS = (5, 16, 33, 70, 130)
NUM_TOKENS = 12


def a_request(family: str, length: int, number: int, **sampling: Any) -> InferenceRequest:
    request = make_inference_request(model=family, request_id=bytes([length, number]) * 8)
    request.prompt_token_ids = make_prompt(length)
    request.sampling = SamplingParams(NUM_TOKENS, ignore_eos=True, seed=number, **sampling)
    return request


def alone(engine: Engine, wanted: InferenceRequest) -> list[int]:
    """What one engine gives for it."""
    request = Request(
        wanted.request_id, 1, PriorityClass.INTERACTIVE, wanted.prompt_token_ids, wanted.sampling, 0
    )
    engine.add_request(request)
    while engine.scheduler.has_requests:
        engine.step()
    return request.output_token_ids


@pytest.mark.parametrize("deterministic", ["true", "false"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_a_prompt_goes_on_in_another_engine_as_in_its_own(
    tmp_path: Path, family: str, deterministic: str
) -> None:
    make_model(tmp_path, family)
    settings = {"HEADRACE_DETERMINISTIC": deterministic, "HEADRACE_MAX_MODEL_LEN": "256"}
    unified, prefill, decode = (load(tmp_path, family, **settings).engine for _ in range(3))
    requests = [
        a_request(family, length, number, temperature=temperature)
        for length in LENGTHS
        for number, temperature in enumerate((0.0, 0.9))
    ]
    expected = [alone(unified, request) for request in requests]
    async with Pair(engines=(prefill, decode), model=family) as pair:
        for request, tokens in zip(requests, expected, strict=True):
            # One after the other: in the fast mode others in a batch may change near ties.
            pair.hand_over(request)
            await pair.end(request)
            assert pair.decode.told(request) == tokens
            await until(lambda: pair.prefill.all_free and pair.decode.all_free)
        assert pair.decode.role.counts == {"adopted": len(requests)}


async def test_chunks_hits_preemption_and_others_in_the_batch_change_nothing(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    unified = load(tmp_path, "llama").engine
    prefill = load(tmp_path, "llama", HEADRACE_MAX_PREFILL_CHUNK="24").engine
    # A block of this model takes 6 KiB: of its blocks these leave too few for all.
    decode = load(tmp_path, "llama", HEADRACE_MAX_PREFILL_CHUNK="40").engine
    held = decode.pool.allocate(decode.pool.num_free_blocks - 26)
    requests = [
        a_request("llama", length, number, temperature=0.9) for number in range(3) for length in LENGTHS
    ]
    expected = [alone(unified, request) for request in requests]
    async with Pair(engines=(prefill, decode), model="llama") as pair:
        for request in requests:
            pair.hand_over(request)
        for request, tokens in zip(requests, expected, strict=True):
            await pair.end(request)
            assert pair.decode.told(request) == tokens
        assert pair.decode.role.counts["adopted"] > 0
        decode.pool.free(held)
        await until(lambda: pair.prefill.all_free and pair.decode.all_free)
    assert prefill.kv_cache_manager.prefix_cache_hits > 0
    assert decode.kv_cache_manager.prefix_cache_hits > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_are_told_when_their_kv_is_there_and_others_are_not(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family)
    engine = load(tmp_path, family, HEADRACE_DETERMINISTIC="false").engine
    runner, pool = kv_pool_of(engine.runner, engine.pool.num_blocks)
    layers = runner.kv_layout.num_layers
    request = Request(bytes(16), 1, PriorityClass.INTERACTIVE, make_prompt(20), SamplingParams(2), 0)
    request.block_table = [3, 7]
    pool.keys[:] = 0
    seen = []

    def on_stored(layer: int) -> None:
        written = [bool(pool.keys[each, 3].any()) for each in range(layers)]
        assert written == [each <= layer for each in range(layers)]
        seen.append(layer)

    runner.watch_layers(on_stored)
    engine.runner.execute(SchedulerOutput([ScheduledSequence(request, 20, True)]))
    assert seen == list(range(layers))
    assert not np.delete(pool.keys, [3, 7], axis=1).any()
    runner.watch_layers(None)
