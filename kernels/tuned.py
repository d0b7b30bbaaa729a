"""Constants of kernels as they were measured on a device: `tuned/<device>.json`, by `headrace kernels tune`.

Where a device or a case is not among them, a kernel's own defaults hold."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).with_name("tuned")

Case = Mapping[str, int | bool]
Constants = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest constants of one kernel in one case; the microseconds that they and the defaults took."""

    kernel: str
    case: Case
    constants: Constants
    us: float
    default_us: float


@dataclass(frozen=True, slots=True)
class TunedTable:
    """What was measured on one device, when, and with which versions."""

    device: str
    measured_on: str
    versions: Mapping[str, str]
    entries: tuple[Measured, ...]

    def find(self, kernel: str, case: Case) -> Constants | None:
        """The constants for just this case."""
        return next(
            (entry.constants for entry in self.entries if entry.kernel == kernel and entry.case == case), None
        )

    def to_json(self) -> str:
        return (
            json.dumps(
                {
                    "device": self.device,
                    "measured_on": self.measured_on,
                    "versions": dict(self.versions),
                    "entries": [
                        {
                            "kernel": entry.kernel,
                            "case": dict(entry.case),
                            "constants": dict(entry.constants),
                            "us": entry.us,
                            "default_us": entry.default_us,
                        }
                        for entry in self.entries
                    ],
                },
                indent=2,
            )
            + "\n"
        )


def file_name(device: str) -> str:
    """By the name that the driver gives, such as "NVIDIA H100 80GB HBM3"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def read_table(path: Path) -> TunedTable:
    """Raises ValueError naming the file where it is not of this form, OSError where it cannot be read."""
    try:
        values: Any = json.loads(path.read_text())
        entries = tuple(
            Measured(
                str(entry["kernel"]),
                {str(name): value for name, value in entry["case"].items()},
                {str(name): int(value) for name, value in entry["constants"].items()},
                float(entry["us"]),
                float(entry["default_us"]),
            )
            for entry in values["entries"]
        )
        return TunedTable(
            str(values["device"]), str(values["measured_on"]), dict(values["versions"]), entries
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a table of tuned constants: {error!r}") from None


@cache
def table_of(device: str) -> TunedTable | None:
    """The table that comes with this version, if there is one for the device. Raises as `read_table`."""
    path = FOLDER / file_name(device)
    return read_table(path) if path.exists() else None


def tuned_constants(device: torch.device, kernel: str, case: Case) -> Constants | None:
    """What was measured on the device; None without a GPU, a table or an entry."""
    if device.type != "cuda":
        return None
    return _constants(device.index, kernel, frozenset(case.items()))


@cache
def _constants(device: int | None, kernel: str, case: frozenset[tuple[str, int]]) -> Constants | None:
    # Asked for with every launch.
    table = table_of(torch.cuda.get_device_name(device))
    return None if table is None else table.find(kernel, dict(case))


def tuning_note(device: str) -> str:
    """What kernels are cut by, in a line for who starts a worker on the device."""
    table = table_of(device)
    if table is None:
        return (
            f"no kernel constants were measured on {device}: the defaults are used; "
            "`headrace kernels tune` measures them"
        )
    return f"{len(table.entries)} kernel constants are as measured on {device} on {table.measured_on}"
