"""Over how many ranks a worker spreads its model: as its setting says, else the model's entry. Pure."""

from schemas.catalog import ModelSpec
from schemas.handoff_records import WorkerRole

SETTING = "HEADRACE_TENSOR_PARALLEL"
_OF_SEVERAL_RANKS = ("auto", "bf16")


class RanksError(ValueError):
    """A number of ranks that does not go with model or machine. The message begins with the setting."""


def choose_ranks(setting: int | None, spec: ModelSpec) -> int:
    """`setting` None: what the catalogue entry says of its deployment, 1 where it says nothing."""
    if setting is not None:
        return setting
    return 1 if spec.deployment is None else spec.deployment.tensor_parallel


def origin(setting: int | None, spec: ModelSpec) -> str:
    """What an error about the number of ranks ends with: empty where the setting gave it."""
    if setting is not None or spec.deployment is None or spec.deployment.tensor_parallel == 1:
        return ""
    return f"; so says the catalogue entry of {spec.id!r}, and {SETTING} overrides it"


def ranks_errors(ranks: int, *, runner: str, linear: str, role: str) -> list[str]:
    """What the other settings do not go with; what the model itself does not is found when it is loaded."""
    if ranks < 1:
        return [f"{SETTING} must be at least 1, got {ranks}"]
    if ranks == 1:
        return []
    if runner == "simulated":
        return [f"{SETTING} is {ranks}: simulated GPUs have HEADRACE_SIMULATED_TENSOR_PARALLEL"]
    found = []
    if linear not in _OF_SEVERAL_RANKS:
        found.append(
            f"{SETTING} is {ranks}: several ranks multiply in bf16, but HEADRACE_LINEAR is {linear!r}"
        )
    if role != WorkerRole.UNIFIED:
        found.append(
            f"HEADRACE_WORKER_ROLE is {role}: a model over {ranks} ranks hands no KV over yet; set {SETTING} "
            "to 1, or the role to unified"
        )
    return found
