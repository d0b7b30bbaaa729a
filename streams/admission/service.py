"""One admission process: what it starts, in which order, and how each part ends."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.codec import default_codec, encode
from schemas.fleet import join, publish_schemas
from schemas.records import Left
from streams.admission.admission import Admission
from streams.admission.config import AdmissionConfig
from streams.admission.decisions import DecisionLog
from streams.admission.dispatcher import Dispatcher
from streams.admission.followers import ROLE, ControlFollower, FleetReader, UsageFollower, follow_heartbeats
from streams.admission.http import HttpServer, bind
from streams.admission.intake import Intake
from streams.admission.metrics import Metrics
from streams.admission.pulse import beat, keep_time, log_decisions

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 3.0


def _now() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Kafka:
    """The clients, not started; `Any` stands for types that carry no type information.

    `faust_app(datadir, on_record, on_assigned)` makes the app whose agent hands every message of
    inference.requests to `on_record`, and every assignment's partition numbers to `on_assigned`.
    """

    producer: Any
    heartbeat_producer: Any
    decision_producer: Any
    control: Any
    heartbeats: Any
    usage: Any
    partition: Callable[[str, int], Any]
    faust_app: Callable[[Path, Callable[[Any], Awaitable[None]], Callable[[list[int]], Awaitable[None]]], Any]

    def clients(self) -> list[Any]:
        return [
            self.producer,
            self.heartbeat_producer,
            self.decision_producer,
            self.control,
            self.heartbeats,
            self.usage,
        ]


class AdmissionService:
    """One process. `run` returns when it was asked to stop, and raises what ended it else."""

    def __init__(self, config: AdmissionConfig, kafka: Kafka) -> None:
        self.config = config
        self.kafka = kafka
        self.admission = Admission(config.policy(), DecisionLog(config.decision_log))
        self.metrics = Metrics()
        self.http = HttpServer(self.not_ready, self.metrics.registry)
        self._stopping = False
        self._control_read = False
        self._assigned = False
        self.dispatcher = Dispatcher(kafka.producer, self.admission, self.metrics, _now)
        put = self.dispatcher.put
        self.fleet = FleetReader(self.admission, put, _now, config.slot)
        self.control = ControlFollower(kafka.control, kafka.partition, self.admission, self.fleet, _now)
        self.usage = UsageFollower(kafka.usage, kafka.partition, self.admission, put, _now)
        self.intake = Intake(self.admission, self.metrics, _now, self.control.catch_up_schemas)

    def not_ready(self) -> str | None:
        """Why requests are not served yet, or None."""
        if self._stopping:
            return "stopping"
        if not self._control_read:
            return "reading control topics"
        if not self._assigned:
            return "no partitions of inference.requests assigned yet"
        if not self.fleet.heard_itself:
            return "own heartbeat has not come back yet"
        return None

    async def run(self, stop: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            tasks = await self._start(stack)
            stopped = asyncio.create_task(stop.wait(), name="stop")
            stack.callback(stopped.cancel)
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            self._stopping = True
            failed = next((task for task in tasks if task.done()), None)
            if failed is not None:
                failed.result()
                raise RuntimeError(f"{failed.get_name()} ended by itself")

    # Each step leaves behind, on the stack, how it is undone; a stop runs these from the last to the first.
    async def _start(self, stack: AsyncExitStack) -> list[asyncio.Task[None]]:
        config, kafka = self.config, self.kafka
        tasks: list[asyncio.Task[None]] = []

        def spawn(name: str, coroutine: Any) -> None:
            task = asyncio.create_task(coroutine, name=name)
            tasks.append(task)
            stack.push_async_callback(_cancel, task)

        # Faust loads most of itself when the app is made: before anyone waits for our heartbeats.
        datadir = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-admission-"))
        app = kafka.faust_app(Path(datadir), self._on_record, self._on_assigned)
        # 1. HTTP first: whoever waits for us can ask why.
        sock = bind(config.http_host, config.http_port)
        port = sock.getsockname()[1]
        server = asyncio.create_task(self.http.serve(sockets=[sock]), name="http")
        tasks.append(server)
        stack.push_async_callback(self._stop_http, server)
        # 2. The broker. What is told by others is read up to now before anyone hears of us.
        async with asyncio.timeout(START_TIMEOUT_S):
            for client in kafka.clients():
                stack.push_async_callback(_close, client)
                await client.start()
            await publish_schemas(kafka.producer, default_codec().schemas())
            await self.control.read_to_end()
            self._control_read = True
            # 3. This process's life has a name.
            address = f"http://{config.http_host}:{port}"
            epoch, nonce = await join(kafka.producer, ROLE, config.slot, address)
        self.fleet.joined(epoch)
        stack.push_async_callback(self._leave, epoch)
        log.info("joined", extra={"epoch": epoch, "address": address})
        spawn("dispatcher", self.dispatcher.run())
        stack.push_async_callback(self._drain)
        spawn("control", self.control.run())
        spawn("heartbeats", follow_heartbeats(kafka.heartbeats, kafka.partition, self.fleet))
        spawn("usage", self.usage.run())
        spawn("pulse", beat(kafka.heartbeat_producer, self.admission, config.slot, epoch, nonce, address))
        spawn("clock", self._keep_time())
        if config.decision_log:
            spawn("decisions", log_decisions(kafka.decision_producer, self.admission, config.shards))
        # 4. Requests come last: by now all that decides about them is known.
        stack.push_async_callback(_stop_faust, app)
        async with asyncio.timeout(START_TIMEOUT_S):
            app.finalize()
            await app.start()
        spawn("faust", _watch(app))
        return tasks

    async def _on_record(self, message: Any) -> None:
        headers = message.headers
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        self.dispatcher.put(
            await self.intake.on_record(message.partition, message.offset, message.key, message.value, pairs)
        )

    async def _on_assigned(self, numbers: list[int]) -> None:
        """The consumer group gave this process these partitions of inference.requests, and no others."""
        partitions = [self.kafka.partition(topics.REQUESTS, number) for number in numbers]
        # What lies below these was for whoever held the partitions before.
        async with asyncio.timeout(START_TIMEOUT_S):
            ends = await self.kafka.control.end_offsets(partitions) if partitions else {}
        self.admission.on_assigned({tp.partition: end for tp, end in ends.items()}, _now())
        self.usage.assignment_changed()
        self._assigned = bool(partitions)
        log.info("partitions assigned", extra={"partitions": sorted(numbers)})

    async def _keep_time(self) -> None:
        await keep_time(self.admission, self.dispatcher, self.metrics, _now, self.config.ack_deadline_s)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.config.stop_timeout_s):
                await self.dispatcher.drain()
        except TimeoutError:
            log.warning("stopped with sends that the broker has not acked")

    async def _leave(self, epoch: int) -> None:
        left = encode(Left(ROLE, self.config.slot, epoch, "stopped"))
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.kafka.producer.send_and_wait(topics.EVENTS, left, partition=0)

    async def _stop_http(self, server: "asyncio.Task[None]") -> None:
        self.http.should_exit = True
        with suppress(Exception):
            await asyncio.wait_for(server, CLOSE_TIMEOUT_S)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


async def _close(client: Any) -> None:
    # Closing hangs while the broker is away; nothing that matters is left to it by now.
    with suppress(Exception):
        await asyncio.wait_for(client.stop(), CLOSE_TIMEOUT_S)


async def _stop_faust(app: Any) -> None:
    with suppress(Exception):
        await asyncio.wait_for(app.stop(), CLOSE_TIMEOUT_S)


async def _watch(app: Any) -> None:
    await app.wait_until_stopped()
    raise app.crash_reason or RuntimeError("Faust stopped by itself")
