"""On what a worker computes, as its settings say it. Pure."""

DEVICES = ("auto", "cuda", "cpu")
SETTING = "HEADRACE_DEVICE"
KV_DTYPES = ("auto", "fp8")


def choose_device(setting: str, has_gpu: bool, *, deterministic: bool) -> str | None:
    """cuda, or None for the CPU. Deterministic mode is of CPUs, so auto does not ask for a GPU then.

    Raises ValueError naming the setting where a GPU is asked for and there is none.
    """
    if setting == "cuda" and not has_gpu:
        raise ValueError(f"{SETTING} is cuda, but torch finds no CUDA device here: set it to cpu, or to auto")
    if setting == "cpu" or (setting == "auto" and (deterministic or not has_gpu)):
        return None
    return "cuda"


def device_problem(device: str | None, *, deterministic: bool, linear: str, fp8_kv: bool) -> str | None:
    """Which settings the device does not go with; None where all do. `device` None is the CPU."""
    if device is None:
        return "HEADRACE_KV_DTYPE is fp8: that is for GPUs, and this is served on the CPU" if fp8_kv else None
    if deterministic:
        return f"HEADRACE_DETERMINISTIC is for CPUs: set {SETTING} to cpu"
    if linear not in ("auto", "bf16"):
        return f"HEADRACE_LINEAR is {linear!r}, which is for CPUs: leave it out, or set {SETTING} to cpu"
    return None
