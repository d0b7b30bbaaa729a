"""How many KV blocks fit a GPU beside everything else. Pure."""

from dataclasses import dataclass

from workers.memory_plan import MEMORY_SHARE
from workers.pool_sizes import MIB, PoolSizes


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """`free_bytes`, of the fullest of the ranks' GPUs, with the weights loaded; `peak_bytes` of them are what
    the worst step takes. `total_bytes` is what a GPU has."""

    free_bytes: int
    total_bytes: int
    peak_bytes: int

    @property
    def room_bytes(self) -> int:
        """What the KV pool can have."""
        return self.free_bytes - self.peak_bytes - reserved_bytes(self.total_bytes)


def reserved_bytes(total_bytes: int) -> int:
    """What is kept free of a GPU of this size: see MEMORY_SHARE."""
    return int(total_bytes * (1 - MEMORY_SHARE))


def plan_device_pools(
    profile: DeviceProfile,
    *,
    host_bytes: int,
    kv_memory_mib: int | None,
    swap_memory_mib: int,
    rank_bytes_per_block: int,
    num_ranks: int,
) -> PoolSizes:
    """Blocks of each rank's GPU, and of the host's memory, of which `host_bytes` are free.

    The settings are of all ranks together; `kv_memory_mib` None is all that is left. Raises ValueError that
    says which setting to change.
    """
    room, block = profile.room_bytes, rank_bytes_per_block
    num_blocks = max(0, room) // block
    if kv_memory_mib is not None:
        num_blocks = kv_memory_mib * MIB // (block * num_ranks)
        if num_blocks < 1:
            raise ValueError(
                f"HEADRACE_KV_MEMORY_MIB is {kv_memory_mib}: raise it, a block takes {block * num_ranks} "
                "bytes"
            )
    if num_blocks < 1 or num_blocks * block > room:
        most = max(0, room) * num_ranks // MIB
        advice = (
            f"lower HEADRACE_KV_MEMORY_MIB to at most {most}"
            if most * MIB >= block * num_ranks
            else "lower HEADRACE_MAX_NUM_SEQS or HEADRACE_MAX_NUM_BATCHED_TOKENS, or raise "
            "HEADRACE_TENSOR_PARALLEL"
        )
        raise ValueError(
            f"the KV pool does not fit: a GPU has {profile.free_bytes // MIB} MiB free, a step takes up to "
            f"{profile.peak_bytes // MIB} and {reserved_bytes(profile.total_bytes) // MIB} are kept free; "
            f"{advice}"
        )
    num_host_blocks = swap_memory_mib * MIB // (block * num_ranks)
    if num_host_blocks * block * num_ranks > host_bytes:
        raise ValueError(
            f"HEADRACE_SWAP_MEMORY_MIB is {swap_memory_mib}: lower it, the host has {host_bytes // MIB} MiB "
            "free"
        )
    return PoolSizes(num_blocks, num_host_blocks)
