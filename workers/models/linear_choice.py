"""Chooses how matrices are multiplied: by what this machine does fastest, or as it was told.

The timing runs in a process of its own, which is killed when it says nothing for too long: single calls of
oneDNN's int8 product were seen to spin for ten minutes, and nothing ends a thread that does. What was found
is kept in a file, for this processor and library; for a day where the timing did not come to its end.
"""

import json
import logging
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from kernels.int8_matmul import supports_panels
from kernels.int8_tiles import ONEDNN_HAS_INT8
from workers.models.fast_linear import ROW_BUCKETS, LinearKind, LinearKinds, same_kind

log = logging.getLogger(__name__)

AUTO = "auto"
LINEAR_MODES = (AUTO, LinearKind.INT8, LinearKind.WEIGHT_ONLY, LinearKind.BF16)

Shape = tuple[int, int]  # out_features, in_features
Timings = dict[Shape, dict[LinearKind, list[float]]]  # seconds for each of ROW_BUCKETS

TIMING_COMMAND = (sys.executable, "-m", "workers.models.linear_timing")
_START_S = 60.0  # the process imports torch
SILENCE_S = 20.0
# Another kind must take this share of int8's time, or less, to be kept beside it: each takes memory of its
# own, is less exact (bf16 apart), and takes the layers of a decode out of their one call.
_WORTH_ANOTHER = 0.5
# A way that hangs does so at the next start too, and each start would wait for it; but it may have been the
# machine that stood still.
_UNFINISHED_KEPT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """Kinds for each shape of matrix."""

    kinds: dict[Shape, LinearKinds]

    def __call__(self, out_features: int, in_features: int) -> LinearKinds:
        """Raises KeyError for a shape that was not asked for."""
        return self.kinds[out_features, in_features]


def choose_linears(mode: str, shapes: Sequence[Shape], cache_folder: Path) -> LinearChoice:
    """mode: one of LINEAR_MODES, where all but `auto` take that kind everywhere, unchecked.

    Raises ValueError for another mode, and for int8 on a processor without instructions for it.
    """
    if mode not in LINEAR_MODES:
        raise ValueError(f"linear mode must be one of {', '.join(LINEAR_MODES)}, got {mode!r}")
    if mode != AUTO:
        return LinearChoice({shape: same_kind(_kind(mode, shape)) for shape in shapes})
    path = cache_folder / f"linear-{_fingerprint(shapes)}.json"
    timings = _read(path)
    if timings is None:
        timings, complete = measure(shapes)
        if complete or all(shape in timings for shape in shapes):
            # Without the file the next start measures again.
            with suppress(OSError):
                _write(path, timings, complete)
    choice = LinearChoice({shape: choose_kinds(timings.get(shape, {})) for shape in shapes})
    for shape, kinds in choice.kinds.items():
        log.info("matrix", extra={"shape": shape, "kinds": dict(zip(ROW_BUCKETS, kinds, strict=True))})
    return choice


def _kind(mode: str, shape: Shape) -> LinearKind:
    kind = LinearKind(mode)
    if kind is not LinearKind.INT8 or supports_panels(*shape):
        return kind
    if not ONEDNN_HAS_INT8:
        raise ValueError("linear mode int8 needs AVX-512 or AVX-VNNI, which this processor lacks: use auto")
    return LinearKind.INT8_ONEDNN


def choose_kinds(seconds: dict[LinearKind, list[float]]) -> LinearKinds:
    """For each number of rows the fastest kind; int8 where no other is much faster; bf16 where nothing is
    known."""
    chosen = []
    for bucket in range(len(ROW_BUCKETS)):
        at_bucket = {kind: times[bucket] for kind, times in seconds.items()}
        fastest = min(at_bucket, key=at_bucket.__getitem__, default=LinearKind.BF16)
        int8 = at_bucket.get(LinearKind.INT8)
        if int8 is not None and at_bucket[fastest] > _WORTH_ANOTHER * int8:
            fastest = LinearKind.INT8
        chosen.append(fastest)
    return tuple(chosen)


def measure(shapes: Sequence[Shape]) -> tuple[Timings, bool]:
    """What the process measured, and whether it came to its end."""
    timings: Timings = {}
    command = [*TIMING_COMMAND, *(f"{out_features}x{in_features}" for out_features, in_features in shapes)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            for result in _results(process):
                if "seconds" in result:
                    out_features, _, in_features = result["shape"].partition("x")
                    shape = int(out_features), int(in_features)
                    of_shape, kind = timings.setdefault(shape, {}), LinearKind(result["kind"])
                    # The same is timed several times, as others on the machine let it.
                    of_shape[kind] = [*map(min, of_shape.get(kind, result["seconds"]), result["seconds"])]
                elif "error" in result:
                    log.info("a way to multiply is not on this machine", extra=result)
            complete = process.wait(SILENCE_S) == 0
        except (TimeoutError, subprocess.TimeoutExpired):
            complete = False
        finally:
            process.kill()
    if not complete:
        log.warning("timing matrices did not come to its end: what was not measured is not used")
    return timings, complete


def _results(process: "subprocess.Popen[bytes]") -> Iterator[dict[str, Any]]:
    """The lines that the process prints, until it closes its end. Raises TimeoutError when it is silent."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    rest = b""
    patience = _START_S
    while True:
        if not select.select([descriptor], [], [], patience)[0]:
            raise TimeoutError
        patience = SILENCE_S
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _fingerprint(shapes: Sequence[Shape]) -> str:
    """Of all that the timings depend on."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
    settings = (torch.__version__, ROW_BUCKETS, [*LinearKind])
    known = (processor, *settings, sorted(shapes))
    return sha256(repr(known).encode()).hexdigest()[:16]


def _read(path: Path) -> Timings | None:
    try:
        kept = json.loads(path.read_text())
        if not kept["complete"] and time.time() - path.stat().st_mtime > _UNFINISHED_KEPT_S:
            return None
        return {
            (entry["shape"][0], entry["shape"][1]): {
                LinearKind(kind): seconds for kind, seconds in entry["seconds"].items()
            }
            for entry in kept["timings"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, timings: Timings, complete: bool) -> None:
    """Whole or not at all: several workers may start at once."""
    entries = [{"shape": shape, "seconds": seconds} for shape, seconds in timings.items()]
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps({"complete": complete, "timings": entries}, indent=1) + "\n")
    unfinished.replace(path)
