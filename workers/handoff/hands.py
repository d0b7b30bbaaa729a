"""Puts together what a worker with a role needs beside its engine and its mailbox."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRecord

from schemas.fleet import FleetView
from schemas.handoff_records import WorkerRole
from schemas.stream_state import Run
from workers.connections import Connections
from workers.engine import EngineThread
from workers.handoff.decode_role import DecodeRole
from workers.handoff.heartbeat_log import HeartbeatLog
from workers.handoff.kv_access import KVAccess
from workers.handoff.metrics import HandoffMetrics
from workers.handoff.prefill_role import PrefillRole
from workers.handoff.role import HandoffRole, Host
from workers.handoff.sender import HandoffSender
from workers.runners import LoadedEngine

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Hands:
    """`watch_fleet` runs as long as the worker; `close` comes before the engine is left."""

    role: HandoffRole
    metrics: HandoffMetrics
    _kv: KVAccess
    _fleet: FleetView
    _heartbeats: AIOKafkaConsumer

    async def watch_fleet(self, decode: Callable[[ConsumerRecord], Awaitable[Any]]) -> None:
        await HeartbeatLog(self._heartbeats, self._fleet, decode).run(self.role.on_fleet_change)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.role.close()
        except TimeoutError:  # a write does not return: the process ends all the same
            return
        self._kv.transport.close()


def hands_of(
    role: WorkerRole,
    run: Run,
    loaded: LoadedEngine,
    thread: EngineThread,
    connections: Connections,
    host: Host,
    on_fatal: Callable[[BaseException], None],
) -> Hands | None:
    """None for a unified worker. Before the engine's thread starts."""
    kv = loaded.kv
    if kv is None:
        return None
    assert connections.handoffs is not None
    assert connections.fleet is not None
    fleet = FleetView()
    fleet.watch_as("worker", run.slot, run.epoch)
    sender = HandoffSender(connections.handoffs, on_fatal)
    metrics = HandoffMetrics()
    made: HandoffRole
    if role is WorkerRole.PREFILL:
        made = prefill = PrefillRole(
            run,
            loaded.spec.id,
            loaded.vocab_size,
            thread,
            kv,
            sender,
            fleet,
            host,
            visible=metrics.observe_visible,
        )
        metrics.written = prefill.writer.counters
    else:
        made = DecodeRole(run, thread, kv, sender, fleet, host)
    metrics.role = made
    return Hands(made, metrics, kv, fleet, connections.fleet)
