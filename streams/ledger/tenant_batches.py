"""Record batches that tenants write: unpacked up to a bound, and not the end of who reads them.

A tenant's client may compress its batches, and a few KB of zeros unpack to gigabytes; aiokafka unpacks a
batch as a whole, whatever comes of it. What cannot be read here becomes one record that says so, at the
batch's last offset, and what lies behind it is read on.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cramjam
from aiokafka import codec
from aiokafka.consumer import fetcher
from aiokafka.record import default_records, memory_records

from schemas.topics import tenant_of_batch_topic
from streams.ledger.batch_records import UnreadableBatch

# Four records of the largest size, or a thousand prompts. Clients make batches of 16 KB to 1 MB.
MAX_UNPACKED_BYTES = 32 << 20
_XERIAL_HEADER_BYTES = 16


class UnpackError(Exception):
    """A batch has more bytes than it may, or is none."""


def bound_batches() -> None:
    """From now on, in this process: batches of all topics are unpacked up to MAX_UNPACKED_BYTES, and those of
    tenants' topics that cannot be read become a record of UnreadableBatch.

    Raises RuntimeError where aiokafka is not as it is expected to be.
    """
    # The batches' module as it is compiled, or in Python.
    modules = {default_records.__name__: default_records}
    modules[memory_records.DefaultRecordBatch.__module__] = _module_of(memory_records.DefaultRecordBatch)
    for module in modules.values():
        for name, decode in _DECODERS.items():
            if not callable(getattr(module, name, None)):
                raise RuntimeError(f"aiokafka has no {module.__name__}.{name}: is it another version?")
            setattr(module, name, decode)
    if not (isinstance(fetcher.PartitionRecords, type) and issubclass(_Records, fetcher.PartitionRecords)):
        raise RuntimeError("aiokafka has no PartitionRecords: is it another version?")
    fetcher.PartitionRecords = _Records


def _module_of(found: type) -> Any:
    return __import__(found.__module__, fromlist=["_"])


def _gzip(payload: Any) -> bytes:
    unpacked, rest = bytearray(), memoryview(payload)
    while rest:
        member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        try:
            unpacked += member.decompress(rest, MAX_UNPACKED_BYTES + 1 - len(unpacked))
        except zlib.error as error:
            raise UnpackError(f"no gzip: {error}") from None
        if len(unpacked) > MAX_UNPACKED_BYTES:
            raise _too_large()
        if not member.eof:
            raise UnpackError("the gzip stream is cut short")
        rest = memoryview(member.unused_data)
    return bytes(unpacked)


def _snappy(payload: Any) -> bytes:
    if not codec._detect_xerial_stream(payload):
        blocks = [memoryview(payload)]
    else:
        rest, blocks = memoryview(payload)[_XERIAL_HEADER_BYTES:], []
        while rest:
            (size,) = struct.unpack_from("!i", rest) if len(rest) >= 4 else (0,)
            if not 0 < size <= len(rest) - 4:
                raise UnpackError("a snappy block is cut short")
            blocks.append(rest[4 : 4 + size])
            rest = rest[4 + size :]
    try:
        if sum(cramjam.snappy.decompress_raw_len(block) for block in blocks) > MAX_UNPACKED_BYTES:
            raise _too_large()
        return b"".join(bytes(cramjam.snappy.decompress_raw(block)) for block in blocks)
    except cramjam.DecompressionError as error:
        raise UnpackError(f"no snappy: {error}") from None


def _framed(name: str, decompress_into: Callable[[Any, bytearray], int]) -> Callable[[Any], bytes]:
    def unpack(payload: Any) -> bytes:
        # Pages that are not written to cost nothing.
        room = bytearray(MAX_UNPACKED_BYTES)
        try:
            size = decompress_into(payload, room)
        except cramjam.DecompressionError as error:
            if "whole buffer" in str(error):
                raise _too_large() from None
            raise UnpackError(f"no {name}: {error}") from None
        return bytes(memoryview(room)[:size])

    return unpack


_DECODERS: dict[str, Callable[[Any], bytes]] = {
    "gzip_decode": _gzip,
    "snappy_decode": _snappy,
    "lz4_decode": _framed("lz4", cramjam.lz4.decompress_into),
    "zstd_decode": _framed("zstd", cramjam.zstd.decompress_into),
}


def _too_large() -> UnpackError:
    return UnpackError(f"they have more than {MAX_UNPACKED_BYTES:,} bytes unpacked")


@dataclass(frozen=True, slots=True)
class _Unread:
    """What stands for a batch, as a record of aiokafka."""

    offset: int
    timestamp: int
    timestamp_type: int
    value: UnreadableBatch
    key: None = None
    checksum: None = None
    headers: tuple[()] = ()


class _Batch:
    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __next__(self) -> Any:
        return next(self._batch)

    def __iter__(self) -> Iterator[Any]:
        batch = self._batch
        try:
            yield from batch
        except Exception as error:
            last = batch.next_offset - 1
            reason = f"records {batch.base_offset} to {last} cannot be read: {error}"
            yield _Unread(last, batch.max_timestamp, batch.timestamp_type, UnreadableBatch(reason))


class _Batches:
    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def has_next(self) -> bool:
        has_next: bool = self._batches.has_next()
        return has_next

    def next_batch(self) -> _Batch:
        return _Batch(self._batches.next_batch())


class _Records(fetcher.PartitionRecords):  # type: ignore[misc]
    def __init__(self, tp: Any, records: Any, *rest: Any, **named: Any) -> None:
        is_tenants = tenant_of_batch_topic(tp.topic) is not None
        super().__init__(tp, _Batches(records) if is_tenants else records, *rest, **named)
