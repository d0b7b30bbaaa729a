"""A worker's scheduler and block pools, as `workers/runners.py` makes them, for GPUs that are simulated."""

from infra.simulator.scenario import Model, Workers, scheduler_config
from workers.block_hash import BlockHasher, PrefixSharing
from workers.config import NO_PREFIX_CACHING
from workers.kv_cache_manager import make_kv_cache_manager
from workers.pool_sizes import MIB
from workers.preemption import SwapCost
from workers.roofline import StepCosts
from workers.scheduler import Scheduler


def make_scheduler(model: Model, workers: Workers, costs: StepCosts, eos_token_id: int) -> Scheduler:
    """With the KV blocks that `costs` has room for, and `swap_memory_mib` on the host."""
    hasher = None
    if workers.prefix_caching != NO_PREFIX_CACHING:
        hasher = BlockHasher(workers.model, "simulated", PrefixSharing(workers.prefix_caching))
    num_host_blocks = workers.swap_memory_mib * MIB // costs.bytes_per_block
    kv_cache_manager = make_kv_cache_manager(costs.num_blocks, num_host_blocks=num_host_blocks, hasher=hasher)
    swap_cost = None
    if num_host_blocks:
        swap_cost = SwapCost(costs.bytes_per_block, costs.swap_bytes_per_s)
    config = scheduler_config(model, workers)
    return Scheduler(config, kv_cache_manager, frozenset({eos_token_id}), swap_cost)
