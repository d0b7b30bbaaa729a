"""The embedded model's canary: right in full precision, and with so much room that the fast mode agrees."""

import json

import pytest
import torch

from infra.local.model import CANARY
from schemas.catalog import Canary as CatalogCanary
from schemas.catalog import Catalog
from schemas.tokenization import Tokenizer
from tests.engine_factories import make_request
from tests.model_files import MODELS_DIR, gemma_folder
from workers.batch import ScheduledSequence
from workers.canary import Canary
from workers.config import WorkerConfig
from workers.model_runner import TorchModelRunner
from workers.runners import LoadedEngine, load_engine

NUM_LEARNED = len(CANARY.output_token_ids)


def load(deterministic: bool) -> LoadedEngine:
    gemma_folder()
    config = WorkerConfig(
        kafka="", models_dir=MODELS_DIR, deterministic=deterministic, threads=2, kv_memory_mib=32
    )
    return load_engine(config)


@pytest.fixture(scope="module")
def fast() -> LoadedEngine:
    return load(deterministic=False)


def test_it_is_the_alphabet() -> None:
    gemma_folder()
    tokenizer = Tokenizer.load(Catalog.load(MODELS_DIR), gemma_folder().name)
    assert CANARY.prompt_token_ids == tokenizer.encode_prompt("A B C D E F")
    assert tokenizer.detokenizer().push(CANARY.output_token_ids) == " G H I J K L M N"


def test_the_installed_model_has_it() -> None:
    spec = json.loads((gemma_folder() / "model.json").read_text())
    assert CatalogCanary(**spec["canary"]) == CANARY


def test_full_precision_gives_it_and_never_hesitates() -> None:
    runner = load(deterministic=True).engine.runner
    assert isinstance(runner, TorchModelRunner)
    request = make_request(max_tokens=100)
    request.prompt_token_ids, request.block_table = list(CANARY.prompt_token_ids), [0]
    margins = []
    for token_id in CANARY.output_token_ids:
        num_tokens = request.num_tokens - request.num_computed_tokens
        logits = runner.compute_logits([ScheduledSequence(request, num_tokens, samples=True)])[0]
        request.num_computed_tokens += num_tokens
        best = torch.log_softmax(logits.float(), dim=-1).topk(2)
        assert best.indices[0] == token_id
        margins.append(float(best.values[0] - best.values[1]))
        request.output_token_ids.append(token_id)
    print("margins", [round(margin, 2) for margin in margins])
    assert min(margins) > 2.0


def test_the_fast_mode_gives_it_alone_and_in_company(fast: LoadedEngine) -> None:
    assert fast.canary is not None
    assert fast.canary.known == CANARY.output_token_ids
    fast.canary.first_run(fast.engine)
    for number in range(8):
        mate = make_request(number + 10, prompt_len=20, max_tokens=40, ignore_eos=True)
        fast.engine.add_request(mate)
    fast.engine.step()
    for _ in range(2):
        request = fast.canary.next_run()
        assert request is not None
        fast.engine.add_request(request)
        while request.finish_reason is None:
            for output in fast.engine.step()[1]:
                fast.canary.on_output(output)
    while fast.engine.scheduler.has_requests:
        fast.engine.step()


def test_a_model_that_comes_without_one_learns_the_same(fast: LoadedEngine) -> None:
    canary = Canary(CANARY.prompt_token_ids)
    canary.first_run(fast.engine)
    assert canary.known == CANARY.output_token_ids


def test_what_is_learned_ends_before_the_first_near_tie(fast: LoadedEngine) -> None:
    catalog = Catalog.load(MODELS_DIR)
    prompt = Tokenizer.load(catalog, fast.spec.id).encode_prompt("The")
    canary = Canary(prompt)
    canary.first_run(fast.engine)
    assert canary.known is not None
    assert len(canary.known) < NUM_LEARNED
