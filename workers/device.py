"""On what a worker computes, as its settings say it. Pure."""

from schemas.catalog import ModelSpec

DEVICES = ("auto", "cuda", "cpu")
SETTING = "HEADRACE_DEVICE"
KV_DTYPES = ("auto", "bf16", "fp8")


def choose_device(setting: str, has_gpu: bool, *, deterministic: bool) -> str | None:
    """cuda, or None for the CPU. Deterministic mode is of CPUs, so auto does not ask for a GPU then.

    Raises ValueError naming the setting where a GPU is asked for and there is none.
    """
    if setting == "cuda" and not has_gpu:
        raise ValueError(f"{SETTING} is cuda, but torch finds no CUDA device here: set it to cpu, or to auto")
    if setting == "cpu" or (setting == "auto" and (deterministic or not has_gpu)):
        return None
    return "cuda"


def choose_fp8_kv(setting: str, spec: ModelSpec, *, has_fp8: bool) -> bool:
    """Whether keys and values are in FP8 on GPUs, of which `has_fp8` says whether they have it; auto is what
    the catalogue entry says of its deployment, where they have."""
    if setting == "auto":
        return has_fp8 and spec.deployment is not None and spec.deployment.kv_format == "fp8"
    return setting == "fp8"


def device_problem(device: str | None, *, deterministic: bool, linear: str, kv_dtype: str) -> str | None:
    """Which settings the device does not go with; None where all do. `device` None is the CPU."""
    if device is None:
        if kv_dtype == "auto":
            return None
        return f"HEADRACE_KV_DTYPE is {kv_dtype}: that is for GPUs, and this is served on the CPU"
    if deterministic:
        return f"HEADRACE_DETERMINISTIC is for CPUs: set {SETTING} to cpu"
    if linear not in ("auto", "bf16"):
        return f"HEADRACE_LINEAR is {linear!r}, which is for CPUs: leave it out, or set {SETTING} to cpu"
    return None
