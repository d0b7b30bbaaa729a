"""Memory on the real model: a burst takes what the start measured, and what does not fit is refused."""

import ctypes
import random
from collections.abc import Iterator

import pytest

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from tests.engine_factories import make_config, make_kv
from tests.model_files import MODELS_DIR, gemma_folder
from workers.config import load_config
from workers.engine import Engine
from workers.memory import peak_bytes, resident_bytes
from workers.memory_profile import profile_memory, worst_batches
from workers.model_runner import TorchModelRunner
from workers.pool_sizes import MARGIN_BYTES, MIB
from workers.request import Request
from workers.runners import load_engine

CONFIG = make_config(max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512, max_prefill_chunk=512)


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchModelRunner]:
    runner = TorchModelRunner(gemma_folder() / "model.gguf", max_model_len=1024, num_threads=2)
    yield runner
    runner.free_kv_cache()


def burst(vocab_size: int) -> list[Request]:
    """More than runs at a time, of all lengths, with all that sampling offers."""
    rng = random.Random(1)
    return [
        Request(
            request_id=number.to_bytes(16, "big"),
            attempt=1,
            priority=rng.choice(list(PriorityClass)),
            prompt_token_ids=[rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 20, 100, 300]))],
            sampling=SamplingParams(
                max_tokens=rng.randint(1, 16),
                temperature=rng.choice([0.0, 1.0]),
                top_p=rng.choice([0.5, 0.999, 1.0]),
                top_k=rng.choice([0, 50]),
                min_p=rng.choice([0.0, 0.01]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                presence_penalty=rng.choice([0.0, 1.0]),
                logprobs=rng.choice([None, 20]),
                ignore_eos=True,
            ),
            reply_partition=0,
            expected_output_tokens=1,
        )
        for number in range(32)
    ]


def test_the_profiled_steps_are_at_the_limits() -> None:
    prompts, decodes = worst_batches(CONFIG, 1000)
    assert prompts.total_num_scheduled_tokens == CONFIG.max_num_batched_tokens
    assert len(prompts.scheduled) == CONFIG.max_num_seqs
    assert len(decodes.scheduled) == CONFIG.max_num_seqs + 1, "the canary's seat"
    for batch in (prompts, decodes):
        assert all(sequence.samples for sequence in batch.scheduled)


def test_a_burst_takes_no_more_than_was_profiled(runner: TorchModelRunner) -> None:
    # What loading has left in the allocator would serve the steps, and nothing would be seen of them.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with_weights = resident_bytes()
    profile = profile_memory(runner, CONFIG, runner.vocab_size)
    kv = make_kv(num_blocks=50, num_host_blocks=40, sharing="tenant")
    engine = Engine(CONFIG, runner, kv, frozenset())
    pools = (50 + 40) * runner.bytes_per_block
    before = resident_bytes() - with_weights - pools

    def run() -> None:
        requests = burst(runner.vocab_size)
        requests.sort(key=lambda request: -request.priority)
        for request in requests:
            assert engine.add_request(request) == []
            engine.step()
        while engine.scheduler.has_requests:
            engine.step()

    taken = before + peak_bytes(run)
    print(f"profiled {profile.peak_bytes // MIB} MiB, a burst takes {taken // MIB}")
    assert taken < profile.peak_bytes + MARGIN_BYTES // 2
    assert engine.scheduler.num_preemptions, "the pools were full"


def test_a_pool_that_does_not_fit_ends_the_start_with_advice() -> None:
    gemma_folder()
    config = load_config(
        {
            "HEADRACE_KAFKA": "127.0.0.1:1",
            "HEADRACE_MODELS_DIR": str(MODELS_DIR),
            "HEADRACE_THREADS": "1",
            "HEADRACE_MAX_NUM_SEQS": "2",
            "HEADRACE_MAX_NUM_BATCHED_TOKENS": "16",
            "HEADRACE_KV_MEMORY_MIB": str(1 << 30),
        }
    )
    with pytest.raises(ValueError, match=r"lower HEADRACE_KV_MEMORY_MIB to at most \d+$"):
        load_engine(config)
