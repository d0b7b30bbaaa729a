"""What a request gets must not depend on what happens to it or beside it: the real model in an engine.

In deterministic mode to the token, in fast mode but for near ties. The runner alone is compared bit for bit
in test_gemma_logits.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from schemas.sampling import TokenLogprobs
from tests.engine_factories import check_invariants, make_config, make_kv
from tests.model_files import gemma_folder
from workers.batch import PreemptionMode
from workers.engine import Engine
from workers.model_runner import TorchModelRunner
from workers.request import FinishReason, Request, RequestOutput

SYSTEM_PROMPT = [2, *range(1000, 1040)]
NUM_OUTPUT_TOKENS = 8
SAMPLINGS = [
    SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.9, seed=1, ignore_eos=True),
    SamplingParams(
        max_tokens=NUM_OUTPUT_TOKENS, temperature=1.1, top_k=200, top_p=0.95, seed=2, ignore_eos=True
    ),
    SamplingParams(
        max_tokens=NUM_OUTPUT_TOKENS,
        temperature=0.7,
        min_p=0.02,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        seed=3,
        ignore_eos=True,
    ),
]


def make_request(
    number: int, sampling: SamplingParams | None = None, *, attempt: int = 1, output: Sequence[int] = ()
) -> Request:
    """Requests 0 … 3: a common beginning, own ends of 3 to 21 tokens, own ways to sample."""
    return Request(
        request_id=bytes([number]) * 16,
        attempt=attempt,
        priority=PriorityClass.INTERACTIVE,
        prompt_token_ids=[*SYSTEM_PROMPT, *range(5000 + 100 * number, 5003 + 106 * number)],
        sampling=sampling or SAMPLINGS[number],
        reply_partition=0,
        output_token_ids=list(output),
        expected_output_tokens=1,
    )


def make_requests() -> list[Request]:
    return [make_request(number) for number in range(len(SAMPLINGS))]


@dataclass
class Run:
    """A finished run: the tokens and logprobs by request number, and what happened on the way."""

    engine: Engine
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    modes: Counter[PreemptionMode] = field(default_factory=Counter)

    @property
    def num_hits(self) -> int:
        return self.engine.kv_cache_manager.prefix_cache_hits


@dataclass
class Setting:
    """An engine around `runner`, and what it is given: requests by the step in which they come."""

    num_blocks: int = 200
    num_host_blocks: int = 0
    sharing: str = "off"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 512

    def run(self, runner: TorchModelRunner, arriving: dict[int, list[Request]]) -> Run:
        runner.free_kv_cache()
        config = make_config(
            max_model_len=512,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk=self.max_prefill_chunk,
        )
        kv = make_kv(self.num_blocks, self.num_host_blocks, self.sharing)
        run = Run(Engine(config, runner, kv, frozenset()))
        requests: list[Request] = []
        step = 0
        while run.engine.scheduler.has_requests or step <= max(arriving):
            outputs: list[RequestOutput] = []
            for request in arriving.get(step, []):
                requests.append(request)
                outputs += run.engine.add_request(request)
            batch, sampled = run.engine.step()
            run.modes.update(preempted.mode for preempted in batch.preempted)
            for output in outputs + sampled:
                assert output.error == ""
                run.logprobs.setdefault(output.request.request_id[0], []).extend(output.logprobs)
            check_invariants(run.engine.scheduler, requests)
            step += 1
        for request in requests:
            if request.finish_reason is not FinishReason.SUPERSEDED:
                run.tokens[request.request_id[0]] = request.output_token_ids
        return run


@pytest.fixture(scope="module")
def exact() -> Iterator[TorchModelRunner]:
    runner = TorchModelRunner(
        gemma_folder() / "model.gguf", max_model_len=512, deterministic=True, num_threads=2
    )
    yield runner
    runner.free_kv_cache()


@pytest.fixture(scope="module")
def fast() -> Iterator[TorchModelRunner]:
    runner = TorchModelRunner(gemma_folder() / "model.gguf", max_model_len=512, num_threads=2)
    yield runner
    runner.free_kv_cache()


@pytest.fixture(scope="module")
def alone(exact: TorchModelRunner) -> dict[int, list[int]]:
    """Each request in an engine of its own, its prompt in one piece."""
    tokens: dict[int, list[int]] = {}
    for request in make_requests():
        tokens |= Setting().run(exact, {0: [request]}).tokens
    assert all(len(each) == NUM_OUTPUT_TOKENS for each in tokens.values())
    assert len({tuple(each) for each in tokens.values()}) == len(SAMPLINGS)
    return tokens


def of_class(requests: list[Request], priority: PriorityClass) -> list[Request]:
    for request in requests:
        request.priority = priority
    return requests


def batch_then_interactive() -> dict[int, list[Request]]:
    """Two batch requests run when two interactive ones come: in a small pool they must give way."""
    requests = make_requests()
    return {0: of_class(requests[2:], PriorityClass.BATCH), 5: requests[:2]}


# Each request needs 4 or 5 blocks to its end.
SMALL_POOL = 10


def test_batch_mates_do_not_matter(exact: TorchModelRunner, alone: dict[int, list[int]]) -> None:
    assert Setting().run(exact, {0: make_requests()}).tokens == alone


def test_chunks_do_not_matter(exact: TorchModelRunner, alone: dict[int, list[int]]) -> None:
    requests = make_requests()
    arriving = {0: requests[:2], 3: requests[2:]}
    setting = Setting(max_prefill_chunk=5, max_num_batched_tokens=40, max_num_seqs=40)
    assert setting.run(exact, arriving).tokens == alone


def test_prefix_hits_do_not_matter(exact: TorchModelRunner, alone: dict[int, list[int]]) -> None:
    first, again = make_requests(), make_requests()
    run = Setting(sharing="tenant").run(exact, {0: first[:3], 15: again[1:]})
    assert run.tokens == alone
    assert [r.num_cached_tokens for r in first[:3]] == [0, 32, 32]
    assert [r.num_cached_tokens for r in again[1:]] == [48, 48, 32]


def test_preemption_by_recompute_does_not_matter(
    exact: TorchModelRunner, alone: dict[int, list[int]]
) -> None:
    run = Setting(num_blocks=SMALL_POOL).run(exact, batch_then_interactive())
    assert run.tokens == alone
    assert run.modes[PreemptionMode.RECOMPUTE] >= 1
    assert not run.modes[PreemptionMode.SWAP]


def test_preemption_by_swap_does_not_matter(exact: TorchModelRunner, alone: dict[int, list[int]]) -> None:
    run = Setting(num_blocks=SMALL_POOL, num_host_blocks=40).run(exact, batch_then_interactive())
    assert run.tokens == alone
    assert run.modes[PreemptionMode.SWAP] >= 1
    assert not run.modes[PreemptionMode.RECOMPUTE]


def test_all_of_it_at_once_does_not_matter(exact: TorchModelRunner, alone: dict[int, list[int]]) -> None:
    setting = Setting(
        num_blocks=7,
        num_host_blocks=6,
        sharing="tenant",
        max_prefill_chunk=11,
        max_num_batched_tokens=24,
        max_num_seqs=4,
    )
    run = setting.run(exact, batch_then_interactive())
    assert run.tokens == alone
    assert run.modes[PreemptionMode.SWAP]
    assert run.num_hits


def test_resumed_at_any_position(exact: TorchModelRunner, alone: dict[int, list[int]]) -> None:
    """Many positions of all requests in one batch: another engine goes on where a lost one stopped."""
    resumed = []
    for number, tokens in alone.items():
        for position in range(number % 3, NUM_OUTPUT_TOKENS, 3):
            request = make_request(number, attempt=2, output=tokens[:position])
            request.request_id = bytes([number, position]) * 8
            resumed.append(request)
    Setting(num_blocks=400, sharing="tenant").run(exact, {0: resumed})
    for request in resumed:
        assert request.output_token_ids == alone[request.request_id[0]], request.request_id[1]


def test_a_higher_attempt_takes_over_in_the_same_engine(
    exact: TorchModelRunner, alone: dict[int, list[int]]
) -> None:
    requests = make_requests()
    arriving = {0: requests}
    for number in range(2):
        # What the owner had read when it sent the retry: less than this engine has by then.
        higher = make_request(number, attempt=2, output=alone[number][: 1 + number])
        arriving[4 + number] = [higher]
    assert Setting(sharing="tenant").run(exact, arriving).tokens == alone
    assert [r.finish_reason for r in requests[:2]] == [FinishReason.SUPERSEDED] * 2


GREEDY = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, logprobs=5)
# In nats. The logits of fast mode err by up to 0.4 (test_gemma_logits.py), and two of them make a gap.
NEAR_TIE = 0.8


def greedy_requests() -> list[Request]:
    return [make_request(number, GREEDY) for number in range(len(SAMPLINGS))]


@pytest.fixture(scope="module")
def fast_alone(fast: TorchModelRunner) -> list[Run]:
    return [Setting().run(fast, {0: [request]}) for request in greedy_requests()]


@pytest.mark.parametrize(
    ("setting", "arriving"),
    [
        pytest.param(Setting(), lambda r: {0: r}, id="mates"),
        pytest.param(Setting(max_prefill_chunk=9), lambda r: {0: r[:2], 2: r[2:]}, id="chunks"),
        pytest.param(Setting(sharing="tenant"), lambda r: {0: r[:1], 3: r[1:]}, id="prefix hits"),
        pytest.param(
            Setting(num_blocks=SMALL_POOL),
            lambda r: {0: of_class(r[2:], PriorityClass.BATCH), 5: r[:2]},
            id="recompute",
        ),
        pytest.param(
            Setting(num_blocks=SMALL_POOL, num_host_blocks=40),
            lambda r: {0: of_class(r[2:], PriorityClass.BATCH), 5: r[:2]},
            id="swap",
        ),
    ],
)
def test_fast_mode_diverges_at_near_ties_only(
    fast: TorchModelRunner,
    fast_alone: list[Run],
    setting: Setting,
    arriving: Callable[[list[Request]], dict[int, list[Request]]],
) -> None:
    run = setting.run(fast, arriving(greedy_requests()))
    assert bool(run.num_hits) == (setting.sharing != "off")
    assert bool(run.modes) == (setting.num_blocks == SMALL_POOL)
    assert bool(run.modes[PreemptionMode.SWAP]) == bool(setting.num_host_blocks)
    num_equal = 0
    for number, by_itself in enumerate(fast_alone):
        expected, got = by_itself.tokens[number], run.tokens[number]
        differing = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
        if not differing:
            num_equal += 1
            continue
        first = differing[0]
        for logprobs in (by_itself.logprobs[number][first], run.logprobs[number][first]):
            by_token = dict(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))
            gap = abs(by_token[expected[first]] - by_token[got[first]])
            print(f"request {number} diverges at {first}: gap {gap:.3f}")
            assert gap < NEAR_TIE
    print(f"{num_equal} of {len(SAMPLINGS)} are equal to the token")
