"""A prefill and a decode worker in one process: real engines, threads, bytes and serving, and a wire between
them that the test holds in its hands."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from aiokafka import AIOKafkaProducer

from schemas.codec import decode, encode
from schemas.fleet import FleetView
from schemas.handoff_records import Message, WorkerRole
from schemas.records import (
    Cancellation,
    Completion,
    Dispatch,
    InferenceRequest,
    Left,
    Pairing,
    Tokens,
    Usage,
)
from schemas.stream_state import Run
from schemas.tokenization import Tokenizer
from tests.engine_factories import make_config, make_kv
from workers.batch import RunnerOutput, SchedulerOutput
from workers.block_pool import BLOCK_SIZE
from workers.decision_log import DecisionLog
from workers.engine import Engine, EngineThread
from workers.engine_stats import EngineStats
from workers.engine_watch import EngineWatch
from workers.handoff.decode_role import DecodeRole
from workers.handoff.effects import Send
from workers.handoff.kv_access import register
from workers.handoff.memory_transport import MemoryNetwork
from workers.handoff.prefill_role import PrefillRole
from workers.handoff.role import HandoffRole
from workers.handoff.sender import HandoffSender
from workers.handoff.write_lane import WriteLimits
from workers.live_requests import LiveRequests
from workers.metrics import WorkerMetrics
from workers.outbox import Outbox
from workers.runners import LoadedEngine
from workers.serving import Serving
from workers.simulated_kv import LAYOUT, stored_words
from workers.simulated_runner import SimulatedRunner
from workers.text_rules import TextRules

VOCAB_SIZE = 127
PREFILL, DECODE = Run(0, 11), Run(1, 22)
_numbers = iter(range(1, 1 << 30))


class CheckedRunner(SimulatedRunner):
    """Raises AssertionError when a sequence would attend to KV that is not that of its own tokens."""

    def __init__(self, step_ms: float) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, first_token_id=32, step_ms=step_ms, hands_over=True)

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        output = super().execute(batch)
        keys, values = (part.view("uint32").reshape(LAYOUT.num_layers, -1) for part in self.kv_memory())
        for sequence in batch.scheduled:
            request = sequence.request
            end = request.num_computed_tokens + sequence.num_scheduled_tokens
            slots = [request.block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(end)]
            right = stored_words(request.tokens(0, end), range(end))
            layers = LAYOUT.num_layers
            assert (keys[:, slots] == right[:layers]).all(), "wrong keys"
            assert (values[:, slots] == right[layers:]).all(), "wrong values"
        return output


class AckingProducer:
    """Takes all and acks it at once."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    async def send(
        self, topic: str, value: bytes, partition: int, headers: object = None
    ) -> asyncio.Future[None]:
        self.values.append(decode(value))
        acked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        acked.set_result(None)
        return acked


@dataclass
class Wire:
    """Brings messages, but those of the kinds in `holds`, which wait in `held`, or are lost in `drops`."""

    roles: dict[int, HandoffRole] = field(default_factory=dict)
    holds: set[type] = field(default_factory=set)
    drops: set[type] = field(default_factory=set)
    held: list[tuple[int, Message]] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)

    def put(self, slot: int, message: Message) -> None:
        message = decode(encode(message))
        self.sent.append(message)
        if type(message) in self.holds:
            self.held.append((slot, message))
        elif type(message) not in self.drops:
            asyncio.get_running_loop().call_soon(self._bring, slot, message)

    def release(self) -> None:
        self.holds.clear()
        held, self.held = self.held, []
        for slot, message in held:
            self._bring(slot, message)

    def _bring(self, slot: int, message: Message) -> None:
        if slot in self.roles:
            self.roles[slot].on_message(message, None)


class WireSender:
    """In the place of a `HandoffSender`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._is_halted = False

    def trace(self, transfer_id: bytes, traceparent: str | None) -> None:
        pass

    def send(self, message: Send) -> None:
        if not self._is_halted:
            self._wire.put(message.slot, message.record)

    @property
    def is_empty(self) -> bool:
        return True

    def halt(self) -> None:
        self._is_halted = True

    async def close(self) -> None:
        pass


class PlayedWorker:
    def __init__(
        self,
        role: WorkerRole,
        run: Run,
        wire: Wire,
        network: MemoryNetwork,
        engine: Engine,
        *,
        check_all: bool,
        model: str = "simulated",
    ) -> None:
        self.run = run
        self.wire = wire
        self.engine = engine
        self.errors: list[BaseException] = []
        self.tokens, self.usage, decisions = AckingProducer(), AckingProducer(), AckingProducer()
        loop = asyncio.get_running_loop()
        self.thread = EngineThread(
            self.engine,
            lambda: _soon(loop, self.serving.on_results),
            lambda error: _soon(loop, self.errors.append, error),
        )
        outbox = Outbox(
            run.slot, run.epoch, model, 2,
            cast(AIOKafkaProducer, self.tokens), cast(AIOKafkaProducer, self.usage),
            max_records=64, on_blocked=self.thread.set_blocked, on_fatal=self.errors.append,
        )  # fmt: skip
        self.live = LiveRequests(run.slot, run.epoch, model, 320)
        self.serving = Serving(
            cast(LoadedEngine, None),  # only for the heartbeat
            TextRules(Tokenizer.simulated(), 258, [257]),
            self.live,
            self.thread,
            outbox,
            DecisionLog(
                run.slot, run.epoch, "simulated", 2, cast(AIOKafkaProducer, decisions), max_records=8
            ),
            EngineWatch(None, self.thread.step_age, self.thread.add, stall_s=10, stall_exit_s=20),
            WorkerMetrics("simulated", EngineStats),
            on_dead_letter=lambda record, reason: None,
            on_canary_failed=self.errors.append,
            role=role,
        )
        self._outbox = outbox
        self.fleet = FleetView()
        self.access = register(
            engine.runner, engine.pool.num_blocks, network.join(f"worker-{run.slot}-{run.epoch}")
        )
        sender = cast(HandoffSender, WireSender(wire))
        self.role: HandoffRole
        if role is WorkerRole.PREFILL:
            write_limits = WriteLimits(settle_s=0.0, check_all=check_all)
            self.role = PrefillRole(
                run, model, 320, self.thread, self.access, sender, self.fleet, self.serving,
                limits=write_limits,
            )  # fmt: skip
        else:
            self.role = DecodeRole(run, self.thread, self.access, sender, self.fleet, self.serving)
        self.serving.handoffs = self.role
        wire.roles[run.slot] = self.role
        self.thread.start()

    @property
    def all_free(self) -> bool:
        return self.engine.pool.num_free_blocks == self.engine.pool.num_blocks and not self.role.num_live

    def told(self, request: InferenceRequest) -> list[int]:
        chunks = [
            chunk for record in self.tokens.values if isinstance(record, Tokens) for chunk in record.chunks
        ]
        return [t for c in chunks if c.request_id == request.request_id for t in c.token_ids]

    def ends(self, request: InferenceRequest) -> list[Completion]:
        return [
            record
            for record in self.tokens.values
            if isinstance(record, Completion) and record.request_id == request.request_id
        ]

    def rows(self, request: InferenceRequest) -> list[Usage]:
        return [u for u in self.usage.values if isinstance(u, Usage) and u.request_id == request.request_id]

    def hears_left(self, run: Run) -> None:
        self.serving.on_fleet_event(Left("worker", run.slot, run.epoch, "signal SIGKILL"), 1000)

    async def close(self) -> None:
        self.wire.roles.pop(self.run.slot, None)
        self.serving.close()
        await self.role.close()
        await self._outbox.close()
        assert self.thread.stop(5.0)
        self.access.transport.close()


def make_engine(
    step_ms: float, num_blocks: int, num_host_blocks: int, sharing: str, limits: dict[str, Any]
) -> Engine:
    kv = make_kv(num_blocks, num_host_blocks, sharing)
    return Engine(make_config(**limits), CheckedRunner(step_ms), kv, frozenset())


class Pair:
    """Of `engines`, prefill's and decode's, which serve `model`; or of simulated ones."""

    def __init__(
        self,
        *,
        network: MemoryNetwork | None = None,
        step_ms: float = 1.0,
        prefill_blocks: int = 64,
        decode_blocks: int = 64,
        num_host_blocks: int = 0,
        sharing: str = "off",
        check_all: bool = True,
        prefill_limits: dict[str, Any] | None = None,
        decode_limits: dict[str, Any] | None = None,
        engines: tuple[Engine, Engine] | None = None,
        model: str = "simulated",
    ) -> None:
        self.wire = Wire()
        network = network or MemoryNetwork()
        prefill, decode = engines or (
            make_engine(step_ms, prefill_blocks, num_host_blocks, sharing, prefill_limits or {}),
            make_engine(step_ms, decode_blocks, num_host_blocks, sharing, decode_limits or {}),
        )
        self.prefill, self.decode = (
            PlayedWorker(role, run, self.wire, network, engine, check_all=check_all, model=model)
            for role, run, engine in (
                (WorkerRole.PREFILL, PREFILL, prefill),
                (WorkerRole.DECODE, DECODE, decode),
            )
        )

    async def __aenter__(self) -> "Pair":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.prefill.close()
        await self.decode.close()
        assert not self.prefill.errors, self.prefill.errors
        assert not self.decode.errors, self.decode.errors

    def hand_over(self, request: InferenceRequest, *, reserve_ms: int = 500, lease_ms: int = 3000) -> bytes:
        """As admission does: prefill computes the prompt for decode. Returns the transfer."""
        transfer_id = next(_numbers).to_bytes(16, "big")
        pairing = Pairing(transfer_id, DECODE.slot, DECODE.epoch, reserve_ms, lease_ms)
        dispatch = Dispatch(PREFILL.slot, PREFILL.epoch, request.sampling.max_tokens, request, pairing)
        self.prefill.serving.on_dispatch(dispatch, None)
        return transfer_id

    def cancel(self, request: InferenceRequest, *workers: PlayedWorker) -> None:
        record = Cancellation(request.request_id, request.attempt, request.tenant, "test")
        for worker in workers or (self.prefill, self.decode):
            worker.serving.on_cancellation(record)

    async def end(self, request: InferenceRequest) -> Completion:
        await until(lambda: bool(self.decode.ends(request)))
        [end] = self.decode.ends(request)
        return end


def expected_tokens(request: InferenceRequest, count: int) -> list[int]:
    runner = SimulatedRunner(vocab_size=VOCAB_SIZE, first_token_id=32)
    first = len(request.output_token_ids)
    return [runner.token_at(request.request_id, position) for position in range(first, first + count)]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Seconds until it holds. Raises TimeoutError."""
    began = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # engines and writers are threads
            await asyncio.sleep(0.0005)
    return time.monotonic() - began


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
