"""A small Llama and a small Qwen in the worker's own engine, deterministic.

What happens beside a request, or to its prompt, must not change what it gets.
"""

from pathlib import Path

import pytest
from gguf import GGUFWriter

from infra.model_import import import_model
from schemas.catalog import Catalog
from schemas.config import from_env
from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from schemas.tokenization import Tokenizer
from tests.bpe_files import ADDED, add_tokenizer
from tests.decoder_files import CONFIGS, VOCAB_SIZE, make_tensors, write_gguf
from tests.small_model import make_model
from workers.config import WorkerConfig
from workers.request import Request
from workers.runners import LoadedEngine, load_engine

PROMPT = [(7 * position + 3) % 256 for position in range(70)]
NUM_OUTPUT_TOKENS = 6


def load(models_dir: Path, family: str, **settings: str) -> LoadedEngine:
    return load_engine(
        from_env(
            WorkerConfig,
            {
                "HEADRACE_MODELS_DIR": str(models_dir),
                "HEADRACE_MODEL": family,
                "HEADRACE_DETERMINISTIC": "true",
                "HEADRACE_KV_MEMORY_MIB": "4",
                "HEADRACE_THREADS": "1",
                "HEADRACE_CANARY_S": "0",
                "HEADRACE_KAFKA": "127.0.0.1:1",  # not asked
                "HEADRACE_SLOT": "0",
                "HEADRACE_MAX_NUM_SEQS": "4",
                **settings,
            },
        )
    )


def run(loaded: LoadedEngine, *prompts: list[int]) -> list[list[int]]:
    """The tokens of requests that come at once."""
    engine = loaded.engine
    requests = [
        Request(
            request_id=bytes([number]) * 16,
            attempt=1,
            priority=PriorityClass.INTERACTIVE,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.8, seed=3, ignore_eos=True),
            reply_partition=0,
            expected_output_tokens=1,
        )
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add_request(request)
    while engine.scheduler.has_requests:
        engine.step()
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_chunks_prefix_hits_and_others_in_the_batch_change_nothing(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family)
    loaded = load(tmp_path, family)
    (alone,) = run(loaded, PROMPT)
    assert len(alone) == NUM_OUTPUT_TOKENS
    hits = loaded.engine.kv_cache_manager.prefix_cache_hits
    assert run(loaded, PROMPT, PROMPT[:40], [*PROMPT[:32], 9, 9])[0] == alone
    assert loaded.engine.kv_cache_manager.prefix_cache_hits > hits
    in_chunks = load(tmp_path, family, HEADRACE_MAX_PREFILL_CHUNK="16", HEADRACE_PREFIX_CACHING="off")
    assert run(in_chunks, PROMPT) == [alone]


def test_an_imported_gguf_file_is_served(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        # Beside what is trained: a token of no merge, those that stand for themselves, two of padding.
        add_tokenizer(writer, "llama-bpe", VOCAB_SIZE - 3 - len(ADDED))
        writer.add_eos_token_id(VOCAB_SIZE - 3)

    source = write_gguf(tmp_path / "tiny.gguf", CONFIGS["llama"], make_tensors(CONFIGS["llama"]), add=add)
    import_model(source, tmp_path / "models", "tiny")
    loaded = load(tmp_path / "models", "tiny")
    prompt = Tokenizer.load(Catalog.load(tmp_path / "models"), "tiny").encode_prompt("Kafka is a log")
    (output,) = run(loaded, prompt)
    assert len(output) == NUM_OUTPUT_TOKENS
