"""The memory of the device's and the host's KV blocks, and the copies between them."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.models.layers import KVCache

_MEASURED_BLOCKS = 32
_MEASURED_COPIES = 3
_CPU = torch.device("cpu")


class KVMemory:
    """Both pools, allocated and written once, so that their pages are there from the start.

    Zeroed: masked keys are multiplied by 0, and what memory holds could be NaN. `swap_bytes_per_s` is how
    fast blocks are copied one way, measured here; 0 without host blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        *,
        num_layers: int,
        block_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        """block_shape: (block_size, num_kv_heads, head_dim). `device` is where the device's blocks are.

        Raises ValueError when there is no device block, or a negative number of host blocks.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must not be negative, got {num_host_blocks}")

        def allocate(count: int, device: torch.device) -> KVCache:
            shape = (num_layers, count, *block_shape)
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            return KVCache(keys, values)

        self.num_blocks = num_blocks
        self.device = allocate(num_blocks, device)
        self.host = allocate(num_host_blocks, _CPU)
        self._copy = _copy if device.type == "cpu" else copy_between_devices
        self._device_bytes = _bytes(self.device)
        self._host_bytes = _bytes(self.host)
        self.swap_bytes_per_s = self._measure(min(num_blocks, num_host_blocks, _MEASURED_BLOCKS))

    def swap(self, swap_out: Sequence[tuple[int, int]], swap_in: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks over all layers: all pairs (device block, host block) of `swap_out`, then all
        pairs (host block, device block) of `swap_in`."""
        self._copy(self._device_bytes, self._host_bytes, swap_out)
        self._copy(self._host_bytes, self._device_bytes, swap_in)

    def _measure(self, num_blocks: int) -> float:
        if not num_blocks:
            return 0.0
        pairs = [(block, block) for block in range(num_blocks)]
        fastest = float("inf")
        for _ in range(_MEASURED_COPIES):
            began = time.perf_counter()
            self._copy(self._device_bytes, self._host_bytes, pairs)
            fastest = min(fastest, time.perf_counter() - began)
        block = self.device.keys[:, 0]
        return 2 * num_blocks * block.numel() * block.itemsize / fastest


# By numpy, which copies in this thread: torch would wake its threads for every block, and where the cores are
# busy that was 3 to 30 times slower.
def _copy(sources: list[Tensor], targets: list[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    for source, target in zip(sources, targets, strict=True):
        from_bytes, to_bytes = source.numpy(), target.numpy()
        for source_block, target_block in pairs:
            to_bytes[:, target_block] = from_bytes[:, source_block]


def copy_between_devices(
    sources: list[Tensor], targets: list[Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    """The same for memory of different devices, of which one gathers and one scatters: a copy between them
    for all blocks, done when this returns."""
    if not pairs:
        return
    source_blocks, target_blocks = torch.tensor(pairs).unbind(1)
    for source, target in zip(sources, targets, strict=True):
        gathered = source.index_select(1, source_blocks.to(source.device))
        target.index_copy_(1, target_blocks.to(target.device), gathered.to(target.device))


def _bytes(cache: KVCache) -> list[Tensor]:
    """Keys and values as uint8 [num_layers, num_blocks, bytes], in the same memory."""
    return [tensor.flatten(2).view(torch.uint8) for tensor in (cache.keys, cache.values)]
