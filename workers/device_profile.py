"""Runs the largest steps on a GPU and sees what memory of it they take."""

from collections.abc import Callable
from typing import Protocol

import torch

from workers.device_pools import DeviceProfile
from workers.memory_profile import NUM_SCRATCH_BLOCKS, ProfiledRunner, worst_batches
from workers.scheduler_config import SchedulerConfig


class ProfiledDeviceRunner(ProfiledRunner, Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    def free_device_bytes(self) -> int:
        """What the fullest of the ranks' GPUs has free."""


def profile_device_memory(runner: ProfiledDeviceRunner, config: SchedulerConfig) -> DeviceProfile:
    """To be called with the weights loaded and before the pools are allocated. Takes as long as two steps,
    which also leave kernels compiled. All ranks take what this one does, but for the sampler, which is here.
    """
    device = runner.device
    free = runner.free_device_bytes()

    def work() -> None:
        runner.initialize_kv_cache(NUM_SCRATCH_BLOCKS)
        for batch in worst_batches(config, runner.vocab_size):
            runner.execute(batch)

    try:
        peak = _peak_bytes(device, work)
    finally:
        runner.free_kv_cache()
    _, total = torch.cuda.mem_get_info(device)
    return DeviceProfile(free, total, peak)


def _peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """By how much torch's memory on the device grows while `work` runs, at its highest."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)
