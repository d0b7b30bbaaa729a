"""The model runner on the real model: against Hugging Face's logits, and against itself bit for bit.

What tests/fixtures/gemma3_logits.json holds, and how it was made, is in make_gemma3_logits.py beside it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.int8_tiles import ONEDNN_HAS_INT8
from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from tests.model_files import gemma_folder
from workers.batch import ScheduledSequence, SchedulerOutput
from workers.block_pool import BLOCK_SIZE
from workers.model_runner import TorchModelRunner
from workers.request import Request

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "gemma3_logits.json").read_text())
PROMPT: list[int] = FIXTURE["prompt_token_ids"]
NUM_BLOCKS = 256
FAST_LINEAR = "int8" if ONEDNN_HAS_INT8 else "auto"


def load(deterministic: bool, linear: str = FAST_LINEAR) -> TorchModelRunner:
    runner = TorchModelRunner(
        gemma_folder() / "model.gguf",
        max_model_len=2048,
        deterministic=deterministic,
        num_threads=2,
        linear=linear,
    )
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner


@pytest.fixture(scope="module")
def fast() -> TorchModelRunner:
    return load(deterministic=False)


@pytest.fixture(scope="module")
def bf16() -> TorchModelRunner:
    return load(deterministic=False, linear="bf16")


@pytest.fixture(scope="module")
def exact() -> TorchModelRunner:
    return load(deterministic=True)


def request(
    prompt: list[int], block_table: list[int], output: list[int] | None = None, seed: int = 0
) -> Request:
    return Request(
        request_id=seed.to_bytes(16),
        attempt=1,
        priority=PriorityClass.INTERACTIVE,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=100, temperature=0.8, top_p=0.95, seed=seed),
        reply_partition=0,
        output_token_ids=output or [],
        block_table=block_table,
    )


def schedule(request: Request, num_tokens: int | None = None) -> ScheduledSequence:
    """The next tokens of a request; all that is left by default."""
    left = request.num_tokens - request.num_computed_tokens
    num_tokens = min(num_tokens or left, left)
    return ScheduledSequence(request, num_tokens, samples=num_tokens == left)


def step(runner: TorchModelRunner, *scheduled: ScheduledSequence) -> Tensor:
    """Logits of the sequences that sample; moves the requests on."""
    logits = runner.compute_logits(scheduled)
    for sequence in scheduled:
        sequence.request.num_computed_tokens += sequence.num_scheduled_tokens
    return logits


def prefill(runner: TorchModelRunner, request: Request, chunk: int | None = None) -> Tensor:
    """The last token's logits, [vocab_size]."""
    while True:
        sequence = schedule(request, chunk)
        logits = step(runner, sequence)
        if sequence.samples:
            return logits[0]


@dataclass
class Agreement:
    """Errors against the fixture: of the top-20 logits, and of the log-sum-exp over the vocabulary."""

    max_error: float
    mean_error: float
    logsumexp_error: float
    same_top: int

    @classmethod
    def of(cls, logits: Tensor, last: Tensor) -> "Agreement":
        errors, logsumexp_errors, same_top = [], [], 0
        rows = [*zip(FIXTURE["positions"], logits, strict=True), (FIXTURE["positions"][-1], last)]
        for expected, row in rows:
            errors.append((row[expected["top_ids"]] - torch.tensor(expected["top_logits"])).abs())
            logsumexp_errors.append(abs(row.logsumexp(0).item() - expected["logsumexp"]))
            same_top += int(row.argmax()) == expected["top_ids"][0]
        stacked = torch.stack(errors)
        return cls(stacked.max().item(), stacked.mean().item(), max(logsumexp_errors), same_top)


def agreement(runner: TorchModelRunner, chunk: int | None) -> Agreement:
    """Prefills the prompt in chunks, then asks for the logits at the fixture's positions.

    The fixture's tokens are computed again as one batch of decodes over the blocks of that prefill, so both
    what it stored at all positions and what a decode makes of it are compared.
    """
    blocks = list(range(3, 3 + -(-len(PROMPT) // BLOCK_SIZE)))[::-1]
    last = prefill(runner, request(PROMPT, blocks), chunk)
    decodes = []
    for expected in FIXTURE["positions"]:
        decode = request(PROMPT[: expected["position"] + 1], blocks)
        decode.num_computed_tokens = expected["position"]
        decodes.append(schedule(decode))
    found = Agreement.of(step(runner, *decodes), last)
    print(f"chunk {chunk}: {found}")
    return found


def test_the_fixture_reaches_past_the_sliding_window() -> None:
    assert len(PROMPT) > 600
    positions = [expected["position"] for expected in FIXTURE["positions"]]
    assert len(positions) >= 40
    assert positions[-1] == len(PROMPT) - 1
    assert {511, 512, 513} < set(positions)


@pytest.mark.parametrize("chunk", [None, 512, 100])
def test_fp32_logits_equal_hugging_face(exact: TorchModelRunner, chunk: int | None) -> None:
    """Measured 3e-5 on logits of up to 30; another order of summation explains it."""
    found = agreement(exact, chunk)
    assert found.max_error < 3e-4
    assert found.logsumexp_error < 3e-4
    assert found.same_top == len(FIXTURE["positions"]) + 1


@pytest.mark.parametrize("chunk", [None, 512, 100])
def test_bf16_logits_are_near_hugging_face_in_fp32(bf16: TorchModelRunner, chunk: int | None) -> None:
    """bf16 has 8 bits: logits of 16 to 32 are multiples of 1/8."""
    found = agreement(bf16, chunk)
    assert found.max_error < 0.4
    assert found.mean_error < 0.08
    assert found.logsumexp_error < 0.3
    assert found.same_top >= len(FIXTURE["positions"]) - 3


@pytest.mark.parametrize("chunk", [None, 512, 100])
def test_fast_logits_are_near_hugging_face_in_fp32(fast: TorchModelRunner, chunk: int | None) -> None:
    """How much 8 bits cost is measured in test_model_quality; this finds what is plainly wrong."""
    found = agreement(fast, chunk)
    assert found.mean_error < 0.25
    assert found.logsumexp_error < 0.8
    assert found.same_top >= len(FIXTURE["positions"]) - 5


LENGTHS = [1, 2, 7, 8, 9, 16, 17, 40, 61, 530]


def ten_requests() -> list[Request]:
    """Ten different prompts, each with blocks of its own in mixed order."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    requests = []
    for index, length in enumerate(LENGTHS):
        prompt = [2, *PROMPT[11 * index + 1 :]][:length]
        blocks = [free.pop() for _ in range(-(-(length + 20) // BLOCK_SIZE))]
        requests.append(request(prompt, blocks, seed=index))
    return requests


def test_deterministic_logits_do_not_depend_on_batch_chunks_or_history(exact: TorchModelRunner) -> None:
    alone = [prefill(exact, one) for one in ten_requests()]

    together = step(exact, *[schedule(one) for one in ten_requests()])
    assert torch.equal(together, torch.stack(alone))

    mates = ten_requests()
    in_chunks = prefill(exact, mates[-1], 37)
    assert torch.equal(in_chunks, alone[-1])

    # Decodes beside a prompt chunk, after which the same tokens are prefilled as a resumed request.
    mixed, decodes = ten_requests(), []
    for one in mixed[:9]:
        prefill(exact, one)
    for _ in range(3):
        for one in mixed[:9]:
            one.output_token_ids.append(1000 + len(one.output_token_ids) + len(one.prompt_token_ids))
        decodes = [*step(exact, *[schedule(one) for one in mixed[:9]], schedule(mixed[9], 5))]
    for one, logits in zip(mixed[:9], decodes, strict=True):
        resumed = request(one.prompt_token_ids, one.block_table[::-1], list(one.output_token_ids))
        assert torch.equal(prefill(exact, resumed, 6), logits)


def test_ten_deterministic_streams_sample_the_same_tokens_as_one_by_one(exact: TorchModelRunner) -> None:
    def run(requests: list[Request], num_tokens: int) -> list[list[int]]:
        for _ in range(num_tokens):
            scheduled = [schedule(one) for one in requests]
            sampled = exact.execute(SchedulerOutput(scheduled)).token_ids
            for sequence, token in zip(scheduled, sampled, strict=True):
                assert token is not None
                sequence.request.num_computed_tokens += sequence.num_scheduled_tokens
                sequence.request.output_token_ids.append(token)
        return [one.output_token_ids for one in requests]

    together = run(ten_requests()[:9], 6)
    assert together == [run([one], 6)[0] for one in ten_requests()[:9]]
    # A resume draws at the same positions.
    for one, tokens in zip(ten_requests()[:9], together, strict=True):
        resumed = request(one.prompt_token_ids, one.block_table, tokens[:4], int.from_bytes(one.request_id))
        assert run([resumed], 2)[0] == tokens


def test_fast_mode_batches_agree_with_one_by_one_up_to_rounding(fast: TorchModelRunner) -> None:
    alone = torch.stack([prefill(fast, one, 64) for one in ten_requests()])
    together = step(fast, *[schedule(one) for one in ten_requests()])
    assert (together - alone).abs().mean() < 0.1
    assert torch.equal(together.argmax(1), alone.argmax(1))


def test_a_chunk_that_does_not_reach_the_end_samples_nothing(fast: TorchModelRunner) -> None:
    whole, part = ten_requests()[3:5]
    sampled = fast.execute(SchedulerOutput([schedule(whole), schedule(part, 4)])).token_ids
    assert sampled[0] is not None
    assert sampled[1] is None
    assert fast.execute(SchedulerOutput([])).token_ids == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.block_table.clear(), "block_table has 0 blocks for 40 tokens"),
        (lambda one: setattr(one, "num_computed_tokens", 30), "num_scheduled_tokens 40 from 30 on"),
        (lambda one: one.output_token_ids.append(5), "samples is True at 40 of 41 tokens"),
    ],
)
def test_a_schedule_that_does_not_fit_is_an_error_naming_the_request(
    fast: TorchModelRunner, change: object, message: str
) -> None:
    one = ten_requests()[7]
    sequence = schedule(one)
    assert callable(change)
    change(one)
    with pytest.raises(ValueError, match=f"request 0{{31}}7: {message}"):
        fast.execute(SchedulerOutput([sequence]))


def test_memory_of_the_pool_is_what_bytes_per_block_says(
    fast: TorchModelRunner, exact: TorchModelRunner
) -> None:
    assert fast.bytes_per_block == 18 * 2 * 16 * 256 * 2
    assert exact.bytes_per_block == 18 * 2 * 16 * 256 * 4
    with pytest.raises(RuntimeError, match="allocated already"):
        fast.initialize_kv_cache(1)
