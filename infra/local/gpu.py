"""Which GPUs this machine has, and what a stack that starts on it says of them."""

from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
_NAME = "Model:"


def gpu_names(driver: Path = _DRIVER) -> list[str]:
    """Of NVIDIA's, as the driver tells them; none without a driver. `driver` is the folder with one folder a
    GPU."""
    lines = [line for path in sorted(driver.glob("*/information")) for line in path.read_text().splitlines()]
    return [line.removeprefix(_NAME).strip() for line in lines if line.startswith(_NAME)]


def serving_on(names: list[str]) -> str:
    """What is served on, in a line for who starts a real model."""
    if not names:
        return "no NVIDIA GPU is here: serving on the CPU"
    return f"serving on the CPU: workers of this version do not use a GPU ({', '.join(names)})"
