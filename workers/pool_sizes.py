"""How many KV blocks fit beside everything else. What is allocated at the start is all there ever will be."""

from dataclasses import dataclass

MIB = 1 << 20
# Of the memory that is left, and at most so much: the host has other processes, and the pool's pages are
# written at the start, which takes a second for 2 GiB.
KV_SHARE = 0.25
MOST_UNASKED_BYTES = 512 * MIB
# For what grows after the start: records on their way, the lists of waiting requests, the allocator.
MARGIN_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """`available_bytes` with the weights loaded; `peak_bytes` of them are what the worst step takes."""

    available_bytes: int
    peak_bytes: int

    @property
    def room_bytes(self) -> int:
        """What the two pools can have together."""
        return self.available_bytes - self.peak_bytes - MARGIN_BYTES


@dataclass(frozen=True, slots=True)
class PoolSizes:
    num_blocks: int
    num_host_blocks: int


def plan_pools(
    profile: MemoryProfile,
    *,
    kv_memory_mib: int | None,
    swap_memory_mib: int,
    bytes_per_block: int,
) -> PoolSizes:
    """The sizes that the settings ask for; for `kv_memory_mib` None KV_SHARE of what the profile leaves, and
    no more than MOST_UNASKED_BYTES.

    Raises ValueError that says which setting to lower, and to what.
    """
    if bytes_per_block < 1:
        raise ValueError(f"bytes_per_block must be positive, got {bytes_per_block}")
    num_host_blocks = swap_memory_mib * MIB // bytes_per_block
    if kv_memory_mib is not None:
        num_blocks = kv_memory_mib * MIB // bytes_per_block
        if num_blocks < 1:
            raise ValueError(
                f"HEADRACE_KV_MEMORY_MIB is {kv_memory_mib}: raise it, a block takes {bytes_per_block} bytes"
            )
    else:
        left = profile.room_bytes - num_host_blocks * bytes_per_block
        num_blocks = max(1, int(min(KV_SHARE * left, MOST_UNASKED_BYTES)) // bytes_per_block)
    _check_fit(profile, num_blocks, num_host_blocks, bytes_per_block)
    return PoolSizes(num_blocks, num_host_blocks)


def _check_fit(profile: MemoryProfile, num_blocks: int, num_host_blocks: int, bytes_per_block: int) -> None:
    kv, swap = num_blocks * bytes_per_block, num_host_blocks * bytes_per_block
    room = profile.room_bytes
    if kv + swap <= room:
        return
    # Whole MiB, so that who follows the advice gets on.
    most_kv, most_kv_alone = (room - swap) // MIB, room // MIB
    if most_kv * MIB >= bytes_per_block:
        advice = f"lower HEADRACE_KV_MEMORY_MIB to at most {most_kv}"
    elif room >= kv:
        advice = f"lower HEADRACE_SWAP_MEMORY_MIB to at most {(room - kv) // MIB}"
    elif most_kv_alone * MIB >= bytes_per_block:
        advice = f"set HEADRACE_SWAP_MEMORY_MIB to 0 and HEADRACE_KV_MEMORY_MIB to at most {most_kv_alone}"
    else:
        advice = (
            "lower HEADRACE_MAX_NUM_SEQS or HEADRACE_MAX_NUM_BATCHED_TOKENS, or serve a smaller model: no "
            "memory is left for KV blocks"
        )
    raise ValueError(
        f"a KV pool of {_mib(kv)} MiB and a swap pool of {_mib(swap)} MiB do not fit: "
        f"{_mib(profile.available_bytes)} MiB are available, a step takes up to {_mib(profile.peak_bytes)} "
        f"and {_mib(MARGIN_BYTES)} are kept free; {advice}"
    )


def _mib(num_bytes: int) -> int:
    """Rounded up."""
    return -(-num_bytes // MIB)
