"""Times every way to multiply with matrices of given shapes, and prints each result as soon as it is there.

Run as a process of its own (see `linear_choice`):  python -m workers.models.linear_timing OUTxIN ...

On one thread: all ways share their work among threads alike, and a thread that must be woken, or whose core
is taken, would be what is measured.
"""

import json
import sys
import time

import torch

from kernels.quantize_rows import quantize_rows
from workers.models.fast_linear import ROW_BUCKETS, FastLinear, LinearKind, same_kind

# A kind and a number of rows are timed for this long, at most for so many calls; the first is not counted.
_TIMING_S = 0.01
_MOST_CALLS = 20
# Again and again, seconds apart, for whoever reads to take the best: others may have the processor for as
# long as a timing lasts.
_ROUNDS = 3
# What is sure to work comes first: nothing is measured after a call that does not return.
_ORDER = (LinearKind.INT8, LinearKind.BF16, LinearKind.WEIGHT_ONLY, LinearKind.INT8_ONEDNN)


@torch.inference_mode()
def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    _print(started=True)
    linears: dict[tuple[LinearKind, str], FastLinear] = {}
    for kind in _ORDER:
        for shape in arguments:
            out_features, in_features = map(int, shape.split("x"))
            weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0))
            try:
                linear = FastLinear(weight, same_kind(kind))
                _report(kind, shape, linear)
            except (RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
                _print(kind=kind, shape=shape, error=str(error)[:200])
            else:
                linears[kind, shape] = linear
    for _ in range(_ROUNDS - 1):
        for (kind, shape), linear in linears.items():
            _report(kind, shape, linear)


def _report(kind: LinearKind, shape: str, linear: FastLinear) -> None:
    _print(kind=kind, shape=shape, seconds=[_time(linear, num_rows) for num_rows in ROW_BUCKETS])


def _print(**values: object) -> None:
    print(json.dumps(values), flush=True)


def _time(linear: FastLinear, num_rows: int) -> float:
    """Seconds of the fastest call."""
    x = quantize_rows(torch.ones(num_rows, linear.in_features), linear.input_format(num_rows))
    linear(x)
    times: list[float] = []
    end = time.perf_counter() + _TIMING_S
    while len(times) < _MOST_CALLS and (not times or time.perf_counter() < end):
        began = time.perf_counter()
        linear(x)
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main(sys.argv[1:])
