"""Which GPUs this machine has, which of them a worker gets, and what a stack that starts says of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
_NAME = "Model:"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class GpuError(Exception):
    """GPUs that are asked for and are not here."""


def gpu_names(driver: Path = _DRIVER) -> list[str]:
    """Of NVIDIA's, as the driver tells them; none without a driver. `driver` is the folder with one folder a
    GPU."""
    lines = [line for path in sorted(driver.glob("*/information")) for line in path.read_text().splitlines()]
    return [line.removeprefix(_NAME).strip() for line in lines if line.startswith(_NAME)]


def visible_gpus(num_gpus: int, environ: Mapping[str, str]) -> list[str]:
    """What CUDA calls those that programs of this environment see, of so many that there are."""
    chosen = environ.get(VISIBLE)
    if chosen is None or not num_gpus:
        return [str(index) for index in range(num_gpus)]
    return [name.strip() for name in chosen.split(",") if name.strip()]


def gpus_of_worker(gpus: Sequence[str], slot: int, tensor_parallel: int) -> list[str]:
    """Each worker has its own, one for each of its ranks."""
    return [*gpus[slot * tensor_parallel : (slot + 1) * tensor_parallel]]


def gpu_problem(gpus: Sequence[str], device: str, *, workers: int, tensor_parallel: int) -> str | None:
    """Why workers cannot be given what they are to be served on; None where they can."""
    if not gpus:
        return "--device is cuda, but no NVIDIA GPU is here" if device == "cuda" else None
    needed = workers * tensor_parallel
    if device == "cpu" or needed <= len(gpus):
        return None
    return (
        f"{workers} workers of {tensor_parallel} ranks need {needed} GPUs, and {len(gpus)} are here: ask for "
        "fewer, or for --device cpu"
    )


def serving_on(names: list[str], device: str, *, deterministic: bool) -> str:
    """What is served on, in a line for who starts a real model."""
    if not names:
        return "no NVIDIA GPU is here: serving on the CPU"
    gpus = ", ".join(names)
    if device == "cpu":
        return f"serving on the CPU, as asked, without the GPU that is here ({gpus})"
    if deterministic and device == "auto":
        return f"serving on the CPU: deterministic mode does not use a GPU ({gpus})"
    return f"serving on CUDA ({gpus})"
