"""What serving tells of an engine's results, which come as the test wants them."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaProducer

from schemas.records import Completion, Dispatch, Preemption, Tokens
from schemas.sampling import TokenLogprobs
from schemas.tokenization import Tokenizer
from tests.engine_factories import make_request
from tests.hand_producer import HandProducer, settle
from tests.worker_harness import make_inference_request
from workers.batch import Preempted, PreemptionMode, PreemptionReason, SchedulerOutput
from workers.canary import CANARY_REQUEST_ID, Canary, CanaryFailedError
from workers.decision_log import DecisionLog
from workers.engine import EngineThread, StepResult
from workers.engine_stats import EngineStats
from workers.engine_watch import EngineWatch
from workers.live_requests import LiveRequests
from workers.metrics import WorkerMetrics
from workers.outbox import Outbox
from workers.request import FinishReason, Request, RequestOutput
from workers.runners import LoadedEngine
from workers.serving import Serving
from workers.text_rules import TextRules

KNOWN = [70, 71, 72]


@dataclass
class PlayedThread:
    added: list[Request] = field(default_factory=list)
    aborted: list[bytes] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def add(self, request: Request) -> None:
        self.added.append(request)

    def abort(self, request_id: bytes, attempt: int) -> None:
        self.aborted.append(request_id)

    def take_results(self) -> list[StepResult]:
        taken, self.results = self.results, []
        return taken

    def step_age(self, now: float) -> float:
        return 0.0


class Stage:
    def __init__(self) -> None:
        self.thread = PlayedThread()
        self.tokens, self.usage, self.decided = HandProducer(), HandProducer(), HandProducer()
        self.failures: list[CanaryFailedError] = []
        thread = cast(EngineThread, self.thread)
        live = LiveRequests(0, 9, "simulated", 300)
        self.watch = EngineWatch(
            Canary([65], KNOWN), self.thread.step_age, self.thread.add, stall_s=1, stall_exit_s=2
        )
        self.serving = Serving(
            cast(LoadedEngine, None),  # only for the heartbeat
            TextRules(Tokenizer.simulated(), 258, [257]),
            live,
            thread,
            Outbox(
                0, 9, "simulated", 2,
                cast(AIOKafkaProducer, self.tokens), cast(AIOKafkaProducer, self.usage),
                max_records=8, on_blocked=lambda blocked: None, on_fatal=self._fatal,
            ),
            DecisionLog(0, 9, "simulated", 2, cast(AIOKafkaProducer, self.decided), max_records=8),
            self.watch,
            WorkerMetrics("simulated", EngineStats),
            on_dead_letter=lambda record, reason: None,
            on_canary_failed=self.failures.append,
        )  # fmt: skip

    def _fatal(self, error: BaseException) -> None:
        raise error

    def dispatch(self, **fields: Any) -> Request:
        self.serving.on_dispatch(Dispatch(0, 9, 5, make_inference_request(**fields)), None)
        return self.thread.added[-1]

    async def give(self, *outputs: RequestOutput, batch: SchedulerOutput | None = None) -> None:
        self.thread.results.append(StepResult(batch or SchedulerOutput(), list(outputs), 1.0, 2.0))
        self.serving.on_results()
        await settle()

    async def acks(self) -> None:
        for _ in range(4):
            self.tokens.ack(10)
            self.usage.ack(10)
            await settle()

    def run_canary(self) -> Request:
        self.watch.start_canary()
        assert self.thread.added[-1].request_id == CANARY_REQUEST_ID
        return self.thread.added[-1]


async def test_logprobs_go_with_their_tokens_and_steps_that_piled_up_are_one_chunk() -> None:
    stage = Stage()
    request = stage.dispatch()
    logprobs = [TokenLogprobs(-0.1 * n, [n], [-0.1 * n]) for n in (1, 2)]
    stage.thread.results.append(
        StepResult(SchedulerOutput(), [RequestOutput(request, 0, [5], logprobs=logprobs[:1])], 0.0, 1.0)
    )
    await stage.give(RequestOutput(request, 1, [6], logprobs=logprobs[1:]))
    (record,) = stage.tokens.values
    (chunk,) = record.chunks
    assert (chunk.position, chunk.token_ids, chunk.logprobs) == (0, [5, 6], logprobs)


async def test_tokens_that_were_held_back_are_told_and_counted_when_they_come() -> None:
    stage = Stage()
    request = stage.dispatch()
    await stage.give(RequestOutput(request, 0, [5]))
    await stage.give(RequestOutput(request, 1, []))  # two are held
    await stage.give(RequestOutput(request, 1, [6, 7, 8], FinishReason.STOP, text_length=11))
    await stage.acks()
    chunks = [chunk for value in stage.tokens.values if isinstance(value, Tokens) for chunk in value.chunks]
    assert [(chunk.position, chunk.token_ids) for chunk in chunks] == [(0, [5]), (1, [6, 7, 8])]
    completion = stage.tokens.values[-1]
    assert isinstance(completion, Completion)
    assert (completion.output_tokens, completion.finish_reason, completion.text_length) == (4, "stop", 11)
    assert stage.usage.values[0].output_tokens == 4


async def test_held_tokens_of_a_cancelled_request_are_nobodys() -> None:
    stage = Stage()
    request = stage.dispatch()
    await stage.give(RequestOutput(request, 0, [5]))
    request.output_token_ids += [5, 6, 7]  # as the engine has it
    await stage.give(RequestOutput(request, 1, [], FinishReason.CANCELLED))
    await stage.acks()
    assert stage.tokens.values[-1].output_tokens == stage.usage.values[0].output_tokens == 1


async def test_cached_tokens_are_told_in_the_end_and_the_bill() -> None:
    stage = Stage()
    request = stage.dispatch(prompt_len=40)
    request.num_cached_tokens = 32
    await stage.give(RequestOutput(request, 0, [5], FinishReason.LENGTH))
    await stage.acks()
    assert stage.tokens.values[-1].cached_tokens == stage.usage.values[0].cached_tokens == 32


async def test_a_preemption_is_published_but_not_the_canarys() -> None:
    stage = Stage()
    victim, canary, other = make_request(1), stage.run_canary(), make_request(2)
    lost = (PreemptionReason.NO_FREE_BLOCK, PreemptionMode.RECOMPUTE, 9)
    batch = SchedulerOutput(preempted=[Preempted(v, *lost, other) for v in (victim, canary)])
    await stage.give(batch=batch)
    (record,) = stage.decided.values
    assert isinstance(record, Preemption)
    assert (record.request_id, record.tokens_lost) == (victim.request_id, 9)


async def test_a_good_canary_is_told_to_nobody() -> None:
    stage = Stage()
    canary = stage.run_canary()
    await stage.give(RequestOutput(canary, 0, KNOWN[:2]))
    await stage.give(RequestOutput(canary, 2, KNOWN[2:], FinishReason.LENGTH))
    assert stage.failures == stage.tokens.values == stage.usage.values == []
    assert stage.run_canary() is not canary


async def test_with_a_wrong_canary_nothing_of_any_request_is_told_any_more() -> None:
    stage = Stage()
    request, canary = stage.dispatch(), stage.run_canary()
    await stage.give(RequestOutput(request, 0, [5]))
    assert len(stage.tokens.values) == 1
    # In the very step whose results are taken, before or after the canary in the batch.
    await stage.give(RequestOutput(request, 1, [6]), RequestOutput(canary, 0, [KNOWN[0] + 1]))
    (failure,) = stage.failures
    assert "right are" in str(failure)
    await stage.give(RequestOutput(request, 2, [7], FinishReason.LENGTH))
    stage.serving.send_signs_of_life()
    stage.serving.on_dispatch(Dispatch(0, 9, 5, make_inference_request(model="another")), None)
    await stage.acks()
    assert len(stage.tokens.values) == 1
    assert stage.usage.values == []
    assert len(stage.failures) == 1


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ERROR])
async def test_a_superseded_requests_late_output_is_passed_over(reason: FinishReason) -> None:
    stage = Stage()
    old = stage.dispatch(request_id=b"r" * 16)
    stage.dispatch(request_id=b"r" * 16, attempt=2)
    await stage.give(RequestOutput(old, 0, [5], reason))
    assert stage.tokens.values == []
