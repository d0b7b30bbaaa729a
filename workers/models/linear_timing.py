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
# A call that must be expected to take longer, by the rows before it, is not made. Where a library has nothing
# but its reference code for a processor, as oneDNN for int8 on AVX2, 512 rows take minutes.
_LONGEST_CALL_S = 2.0
# What took so many times the fastest's time for every number of rows is not timed again.
_HOPELESS = 10.0
# What is sure to work comes first: nothing is measured after a call that does not return.
_ORDER = (LinearKind.INT8, LinearKind.BF16, LinearKind.WEIGHT_ONLY, LinearKind.INT8_ONEDNN)


@torch.inference_mode()
def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    _print(started=True)
    linears: dict[tuple[LinearKind, str], FastLinear] = {}
    seconds: dict[str, dict[LinearKind, list[float]]] = {shape: {} for shape in arguments}
    for kind in _ORDER:
        for shape in arguments:
            out_features, in_features = map(int, shape.split("x"))
            weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0))
            try:
                linear = FastLinear(weight, same_kind(kind))
                seconds[shape][kind] = _report(kind, shape, linear)
            except (RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
                _print(kind=kind, shape=shape, error=str(error)[:200])
            else:
                linears[kind, shape] = linear
    for _ in range(_ROUNDS - 1):
        for (kind, shape), linear in linears.items():
            if not is_hopeless(kind, seconds[shape]):
                _report(kind, shape, linear)


def is_hopeless(kind: LinearKind, seconds: dict[LinearKind, list[float]]) -> bool:
    """Whether a kind is out of the question for every number of rows. seconds: of all kinds, by bucket."""
    fastest = [min(at_bucket) for at_bucket in zip(*seconds.values(), strict=True)]
    return all(own > _HOPELESS * best for own, best in zip(seconds[kind], fastest, strict=True))


def _report(kind: LinearKind, shape: str, linear: FastLinear) -> list[float]:
    seconds: list[float] = []
    for bucket, num_rows in enumerate(ROW_BUCKETS):
        expected = seconds[-1] * num_rows / ROW_BUCKETS[bucket - 1] if seconds else 0.0
        seconds.append(expected if expected > _LONGEST_CALL_S else _time(linear, num_rows))
    _print(kind=kind, shape=shape, seconds=seconds)
    return seconds


def _print(**values: object) -> None:
    print(json.dumps(values), flush=True)


def _time(linear: FastLinear, num_rows: int) -> float:
    """Seconds of the fastest call."""
    x = quantize_rows(torch.ones(num_rows, linear.in_features), linear.input_format(num_rows))
    began = time.perf_counter()
    linear(x)
    first = time.perf_counter() - began
    if first > _LONGEST_CALL_S:
        return first
    times: list[float] = []
    end = time.perf_counter() + _TIMING_S
    while len(times) < _MOST_CALLS and (not times or time.perf_counter() < end):
        began = time.perf_counter()
        linear(x)
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main(sys.argv[1:])
