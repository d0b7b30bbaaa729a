"""Usage rows by columns, for a table of any size: what `BillingStore` would have written, as Arrow."""

import binascii
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from streams.ledger.billing import OUTPUT_BITS, TIE_BITS

CLASSES = ("interactive", "free", "batch")
_ID_BYTES = 16
_ATTEMPT_UNSEALED = 1 << 1
_MILLISECONDS = pa.timestamp("ms", tz="UTC")


def usage_rows(draw: np.random.Generator, tenants: np.ndarray, month: datetime, model: str) -> pa.Table:
    """A row for each of `tenants` [num_rows] (names), accepted at any time of the 28 days from `month`."""
    count = len(tenants)
    output = draw.geometric(1 / 250, count).astype(np.uint64)
    cached_share = draw.choice(np.array([0.0, 0.0, 0.5, 0.9]), count)
    input_tokens = draw.geometric(1 / 1000, count).astype(np.uint64)
    begin = int(month.replace(tzinfo=UTC).timestamp() * 1000)
    accepted_at = draw.integers(begin, begin + 28 * 86_400_000, count)
    return pa.table(
        {
            "request_id": _hexadecimal(draw.bytes(count * _ID_BYTES), count),
            "tenant": pa.array(tenants).dictionary_encode(),
            "version": _versions(draw, np.ones(count, np.uint64), output),
            "attempt": np.ones(count, np.uint16),
            "sealed": pa.array(np.zeros(count, bool)),
            "class": pa.array(draw.choice(np.array(CLASSES), count)).dictionary_encode(),
            "model": pa.array([model] * count).dictionary_encode(),
            "input_tokens": input_tokens,
            "cached_tokens": (input_tokens * cached_share).astype(np.uint64),
            "output_tokens": output,
            "finish_reason": pa.array(draw.choice(np.array(["stop", "length"]), count)).dictionary_encode(),
            "accepted_at": pa.array(accepted_at).cast(_MILLISECONDS),
            "ended_at": pa.array(accepted_at + draw.integers(200, 30_000, count)).cast(_MILLISECONDS),
            "slot": draw.integers(0, 4, count).astype(np.uint32),
            "epoch": np.full(count, 7, np.uint64),
            "first_token_ms": draw.integers(20, 900, count).astype(np.uint64),
        }
    )


def outranking(draw: np.random.Generator, rows: pa.Table) -> pa.Table:
    """The rows of a second attempt at the same requests, with more output, which count in place of `rows`."""
    output = rows["output_tokens"].to_numpy() + draw.integers(1, 50, len(rows)).astype(np.uint64)
    changed = {
        "attempt": np.full(len(rows), 2, np.uint16),
        "output_tokens": output,
        "version": _versions(draw, np.full(len(rows), 2, np.uint64), output),
    }
    for name, column in changed.items():
        rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(column))
    return rows


def _versions(draw: np.random.Generator, attempt: np.ndarray, output: np.ndarray) -> np.ndarray:
    """As `billing.version` packs them, of unsealed rows; the tie-break is drawn. [num_rows]"""
    tie = draw.integers(0, 1 << TIE_BITS, len(output)).astype(np.uint64)
    rank = attempt * np.uint64(_ATTEMPT_UNSEALED)
    packed: np.ndarray = (rank << np.uint64(OUTPUT_BITS) | output) << np.uint64(TIE_BITS) | tie
    return packed


def _hexadecimal(ids: bytes, count: int) -> pa.Array:
    width = 2 * _ID_BYTES
    offsets = pa.py_buffer(np.arange(0, (count + 1) * width, width, dtype=np.int32))
    return pa.StringArray.from_buffers(count, offsets, pa.py_buffer(binascii.hexlify(ids)))
