"""What other workers reach of this one's KV."""

from dataclasses import dataclass

from workers.config import WorkerConfig
from workers.handoff.kv_pool import KVPool
from workers.handoff.kv_runner import KVRunner, kv_pool_of
from workers.handoff.mooncake_transport import MooncakeTransport
from workers.handoff.transport import Transport


@dataclass(frozen=True, slots=True)
class KVAccess:
    """The pool's memory is registered with the transport."""

    runner: KVRunner
    pool: KVPool
    transport: Transport


def register(runner: object, num_blocks: int, transport: Transport) -> KVAccess:
    """Raises TransferError, and ValueError for a runner that has no KV to hand over."""
    kv_runner, pool = kv_pool_of(runner, num_blocks)
    for memory in (pool.keys, pool.values):
        transport.register(memory.reshape(-1))
    return KVAccess(kv_runner, pool, transport)


def open_kv(config: WorkerConfig, runner: object, num_blocks: int) -> KVAccess:
    """By the transfer engine of the settings. Raises TransferEngineMissingError, and as `register`."""
    transport = MooncakeTransport(config.transfer_host, config.transfer_protocol, config.transfer_devices)
    return register(runner, num_blocks, transport)
