"""One run of a worker, from loading the model over Join to the last record."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiokafka.errors import KafkaError
from prometheus_client import CollectorRegistry

from schemas import topics
from schemas.codec import default_codec, encode
from schemas.fleet import join, publish_schemas
from schemas.priority import PriorityClass
from schemas.records import Drain, Heartbeat
from schemas.stream_state import Run
from workers.ack_watch import AckWatch
from workers.canary import CanaryFailedError
from workers.cancellation_log import CancellationLog
from workers.config import WorkerConfig
from workers.connections import Connections, connect
from workers.daemon_thread import in_daemon_thread
from workers.dead_letter_box import DeadLetterBox
from workers.decision_log import DecisionLog
from workers.engine import EngineThread
from workers.engine_watch import EngineWatch
from workers.handoff.hands import hands_of
from workers.heartbeat import HeartbeatLoop
from workers.http import HttpServer, make_app
from workers.live_requests import LiveRequests
from workers.mailbox import Mailbox
from workers.metrics import WorkerMetrics
from workers.outbox import Outbox
from workers.rank_died import RankDiedError
from workers.runners import LoadedEngine, load_engine
from workers.serving import Serving

log = logging.getLogger(__name__)

T = TypeVar("T")

ROLE = "worker"
_TICK_S = 0.5
_DRAIN_NOTICE_S = 0.2  # admission reads fleet events in batches of up to 100 ms
_DRAIN_POLL_S = 0.01
_RARE_SEND_S = 5.0
_ENGINE_STOP_S = 1.0
_SETTLE_S = 1.0
_FAREWELL_S = 1.0


class Worker:
    """`on_joined` is told the epoch once Join is acked. `stop` is set to have the worker drain and return."""

    def __init__(self, config: WorkerConfig, on_joined: Callable[[int], None], stop: asyncio.Event) -> None:
        self._config = config
        self._on_joined = on_joined
        self._stop = stop
        self._not_ready: Callable[[], str] = lambda: "loading the model"
        self._registry = CollectorRegistry()
        self._loop = asyncio.get_running_loop()
        self._fatal: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Serves until `stop` is set. Raises an ExceptionGroup with whatever else ended it."""
        config = self._config
        app = make_app(lambda: self._not_ready(), self._registry)
        http = HttpServer(app, config.http_host, config.http_port)
        log.info("listening", extra={"address": http.address})
        async with asyncio.TaskGroup() as group:
            group.create_task(http.run_until_stopped())
            fatal = group.create_task(self._raise_fatal())
            loaded = await self._unless_stopped(in_daemon_thread(lambda: _load(config, self._on_rank_died)))
            if loaded is not None:
                self._not_ready = lambda: "connecting to Kafka"
                async with connect(
                    config.kafka, config.layout(), config.start_s, hands_over=loaded.kv is not None
                ) as connections:
                    await self._join_and_serve(loaded, connections, http.address)
            http.should_exit = True
            fatal.cancel()

    async def _join_and_serve(self, loaded: LoadedEngine, connections: Connections, address: str) -> None:
        config, model = self._config, loaded.spec.id
        mailbox = Mailbox(connections.mailbox, config.slot, hands_over=loaded.kv is not None)
        cancellations = CancellationLog(connections.cancellations, config.shards, mailbox.decode)
        async with asyncio.timeout(config.start_s):
            # 1. Our schemas lie in the log before any record of ours.
            await publish_schemas(connections.usage, default_codec().schemas())
            # 2. Places in the mailboxes, 3. Join: whatever is dispatched to this epoch lies behind them.
            offsets = await mailbox.open()
            await cancellations.open()
            epoch, nonce = await join(connections.usage, ROLE, config.slot, address, model, config.role)
        self._on_joined(epoch)
        log.info(
            "joined", extra={"epoch": epoch, "model": model, "num_blocks": loaded.engine.pool.num_blocks}
        )

        live = LiveRequests(config.slot, epoch, model, loaded.vocab_size)
        thread = EngineThread(
            loaded.engine,
            on_results=lambda: self._call_soon(serving.on_results),
            on_fatal=lambda error: self._call_soon(self._fail, error),
        )
        outbox = Outbox(
            config.slot,
            epoch,
            model,
            config.shards,
            connections.tokens,
            connections.usage,
            max_records=config.outbox_records,
            on_blocked=thread.set_blocked,
            on_fatal=self._fail,
        )
        decisions = DecisionLog(
            config.slot,
            epoch,
            model,
            config.shards,
            connections.decisions,
            max_records=config.outbox_records,
        )
        watch = EngineWatch(
            loaded.canary,
            thread.step_age,
            thread.add,
            stall_s=config.stall_s,
            stall_exit_s=config.stall_exit_s,
        )
        metrics = WorkerMetrics(model, lambda: thread.stats, lambda: decisions.num_dropped)
        self._registry.register(metrics)
        wrong: asyncio.Future[CanaryFailedError] = self._loop.create_future()
        serving = Serving(
            loaded,
            loaded.text_rules,
            live,
            thread,
            outbox,
            decisions,
            watch,
            metrics,
            on_dead_letter=DeadLetterBox(connections.usage, config.send_s).put,
            on_canary_failed=wrong.set_result,
            role=config.role,
        )
        hands = hands_of(
            config.role, Run(config.slot, epoch), loaded, thread, connections, serving, self._fail
        )
        if hands is not None:
            serving.handoffs = hands.role
            self._registry.register(hands.metrics)

        def look() -> Heartbeat:
            return Heartbeat(ROLE, config.slot, epoch, nonce, address, serving.status())

        heartbeats = HeartbeatLoop(connections.heartbeats, look)
        for priority, offset in zip(PriorityClass, offsets, strict=True):
            thread.note_read(priority, offset)
        thread.start()
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(mailbox.run(epoch, serving)),
                    group.create_task(cancellations.run(serving.on_cancellation)),
                    group.create_task(heartbeats.run()),
                    group.create_task(self._tick(serving, outbox, watch, heartbeats)),
                    group.create_task(self._run_canary(serving, watch)),
                    group.create_task(self._leave_when_wrong(wrong, watch, outbox, heartbeats)),
                ]
                if hands is not None:
                    background.append(group.create_task(hands.watch_fleet(mailbox.decode)))
                self._not_ready = lambda: watch.why_not_ready(time.monotonic())
                await self._stop.wait()
                await self._drain(serving, mailbox, connections, epoch)
                for task in background:
                    task.cancel()
        finally:
            serving.close()
            if hands is not None:
                await hands.close()
            await outbox.close()
            await decisions.close()
            if not thread.stop(_ENGINE_STOP_S):
                log.warning("the engine is still in a step; leaving it behind")

    async def _drain(self, serving: Serving, mailbox: Mailbox, connections: Connections, epoch: int) -> None:
        """Ends what runs, up to the deadline. What is cut off is seen by its owner in `Left`, and retried."""
        config = self._config
        serving.draining = True
        self._not_ready = lambda: "draining"
        log.info("draining", extra={"epoch": epoch, "requests": serving.num_live})
        deadline = time.monotonic() + config.drain_s
        # 1. All are told. With the broker away nobody can dispatch either.
        try:
            async with asyncio.timeout(_RARE_SEND_S):
                drain = encode(Drain(ROLE, config.slot, epoch))
                await connections.usage.send_and_wait(topics.EVENTS, drain, partition=0)
        except (KafkaError, TimeoutError) as error:
            log.warning("Drain was not delivered", extra={"error": repr(error)})
        # 2. What was dispatched before admission heard of it is still taken.
        await asyncio.sleep(_DRAIN_NOTICE_S)
        mailbox.close_door()
        # 3. The rest ends, and its last record is acked.
        while not serving.is_idle and time.monotonic() < deadline:  # noqa: ASYNC110  # four parts would set it
            await asyncio.sleep(_DRAIN_POLL_S)
        if not serving.is_idle:
            log.warning("drained only in part", extra={"epoch": epoch, "requests": serving.num_live})

    async def _run_canary(self, serving: Serving, watch: EngineWatch) -> None:
        while self._config.canary_s:
            await asyncio.sleep(self._config.canary_s)
            if not serving.draining:
                watch.start_canary()

    async def _leave_when_wrong(
        self,
        wrong: "asyncio.Future[CanaryFailedError]",
        watch: EngineWatch,
        outbox: Outbox,
        heartbeats: HeartbeatLoop,
    ) -> None:
        """Ends a run that computes wrong; serving has fallen silent by then."""
        error = await wrong
        # 1. What was sent before is in the log: nothing of this run comes after the heartbeat that says so.
        with contextlib.suppress(TimeoutError, KafkaError):
            await outbox.settle(_SETTLE_S)
        # 2. All read it. Where the broker is away, nobody read our tokens either.
        watch.failed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await heartbeats.delivered()
        # 3. The parent says Left, with the reason.
        raise error

    async def _tick(
        self, serving: Serving, outbox: Outbox, watch: EngineWatch, heartbeats: HeartbeatLoop
    ) -> None:
        acks = AckWatch(time.monotonic())
        while True:
            await asyncio.sleep(_TICK_S)
            watch.check(time.monotonic())
            serving.check_handoffs(time.monotonic())
            serving.send_signs_of_life()
            now = time.monotonic()
            waited = acks.waited(outbox.age(now), heartbeats.answered, now)
            if waited > self._config.send_s:
                raise TimeoutError(
                    f"a record was unacked for {waited:.0f} s, while Kafka took heartbeats: a client hangs"
                )

    async def _raise_fatal(self) -> None:
        await self._fatal

    def _fail(self, error: BaseException) -> None:
        if not self._fatal.done():
            self._fatal.set_exception(error)

    def _on_rank_died(self, error: RankDiedError) -> None:
        """From a thread of the runner. The run ends at once: owners go on elsewhere from what they have."""
        self._call_soon(self._fail, error)

    def _call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """From another thread; a loop that is closed already has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("the loop is closed")

    async def _unless_stopped(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """Its result, or None when `stop` is set first."""
        task, stopped = asyncio.ensure_future(coroutine), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stopped.cancel()


def _load(config: WorkerConfig, on_rank_died: Callable[[RankDiedError], None]) -> LoadedEngine:
    """An engine that has given the right tokens once, if there is a canary. Raises CanaryFailedError."""
    loaded = load_engine(config, on_rank_died)
    if loaded.canary is not None:
        loaded.canary.first_run(loaded.engine)
    return loaded
