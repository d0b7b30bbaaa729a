"""Batches that tenants write, as aiokafka reads them: each codec, at its bound and over it."""

import gzip
from collections.abc import Callable
from typing import Any

import cramjam
import pytest
from aiokafka import codec
from aiokafka.consumer import fetcher
from aiokafka.record import default_records
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import ConsumerRecord, TopicPartition

from schemas.models import LoadedModel
from streams.ledger import tenant_batches
from streams.ledger.batch_item import BatchItem
from streams.ledger.batch_records import BadRecord, UnreadableBatch, parse
from streams.ledger.tenant_batches import MAX_UNPACKED_BYTES, UnpackError, bound_batches
from tests.batch_world import MODELS

CODECS = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip_decode": gzip.compress,
    "snappy_decode": codec.snappy_encode,
    "lz4_decode": codec.lz4_encode,
    "zstd_decode": codec.zstd_encode,
}
TENANTS = TopicPartition("batch.requests.demo", 0)
OWN = TopicPartition("inference.usage", 0)


@pytest.fixture(autouse=True)
def _bounded() -> None:
    bound_batches()


def batch(codec_name: str, values: list[bytes], base: int = 0) -> bytes:
    builder = default_records.DefaultRecordBatchBuilder(
        magic=2,
        compression_type=CODECS.get(codec_name, 0),
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 30,
    )
    for offset, value in enumerate(values):
        assert builder.append(offset, timestamp=5, key=b"k", value=value, headers=[("h", b"v")])
    raw = bytearray(builder.build())
    raw[:8] = base.to_bytes(8, "big")
    return bytes(raw)


def read(tp: TopicPartition, raw: bytes, fetch_offset: int = 0) -> tuple[list[ConsumerRecord[Any, Any]], int]:
    """The records, and where the next fetch begins."""
    records = fetcher.PartitionRecords(tp, MemoryRecords(raw), [], fetch_offset, None, None, True, 1)
    return list(records), records.next_fetch_offset


@pytest.mark.parametrize("decoder", PACK)
def test_a_batch_is_unpacked_up_to_the_bound(decoder: str) -> None:
    unpack = tenant_batches._DECODERS[decoder]
    for size in (1, MAX_UNPACKED_BYTES):
        text = b"a" * size
        assert unpack(PACK[decoder](text)) == text
    with pytest.raises(UnpackError, match="33,554,432"):
        unpack(PACK[decoder](b"a" * (MAX_UNPACKED_BYTES + 1)))


@pytest.mark.parametrize("decoder", PACK)
def test_what_is_cut_short_or_no_such_format_is_refused(decoder: str) -> None:
    unpack = tenant_batches._DECODERS[decoder]
    packed = PACK[decoder](b"some text that is long enough to have something to cut" * 9)
    for broken in (packed[:-4], b"no such format", packed[:20]):
        with pytest.raises(UnpackError):
            unpack(broken)


def test_snappy_without_blocks_is_read_too() -> None:
    unpack = tenant_batches._DECODERS["snappy_decode"]
    assert unpack(bytes(cramjam.snappy.compress_raw(b"plain"))) == b"plain"
    with pytest.raises(UnpackError, match="33,554,432"):
        unpack(bytes(cramjam.snappy.compress_raw(b"a" * (MAX_UNPACKED_BYTES + 1))))


def test_gzip_of_several_members_counts_as_one() -> None:
    unpack = tenant_batches._DECODERS["gzip_decode"]
    assert unpack(gzip.compress(b"one ") + gzip.compress(b"two")) == b"one two"
    half = gzip.compress(b"a" * (MAX_UNPACKED_BYTES // 2 + 1))
    with pytest.raises(UnpackError):
        unpack(half + half)


@pytest.mark.parametrize("name", CODECS)
def test_records_of_a_codec_are_read(name: str) -> None:
    found, next_offset = read(TENANTS, batch(name, [b"one", b"two"], base=7))
    assert [(r.offset, r.key, r.value, r.headers) for r in found] == [
        (7, b"k", b"one", (("h", b"v"),)),
        (8, b"k", b"two", (("h", b"v"),)),
    ]
    assert next_offset == 9


@pytest.mark.parametrize("name", CODECS)
def test_one_record_stands_for_a_batch_that_is_too_large_and_the_next_is_read(name: str) -> None:
    bomb = batch(name, [b"a" * (MAX_UNPACKED_BYTES // 2)] * 3, base=10)
    found, next_offset = read(TENANTS, bomb + batch(name, [b"good"], base=13))
    assert [(r.offset, r.value) for r in found[1:]] == [(13, b"good")]
    assert next_offset == 14
    assert found[0].offset == 12
    assert isinstance(found[0].value, UnreadableBatch)
    assert found[0].value.startswith(b"records 10 to 12 cannot be read: ")
    assert found[0].headers == ()


def test_what_tenants_cannot_write_is_read_or_raises() -> None:
    found, _ = read(OWN, batch("lz4", [b"one"]))
    assert [r.value for r in found] == [b"one"]
    with pytest.raises(UnpackError):
        read(OWN, batch("zstd", [b"a" * (MAX_UNPACKED_BYTES + 1)]))


def test_a_new_aiokafka_without_what_is_bounded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(default_records, "zstd_decode")
    with pytest.raises(RuntimeError, match="zstd_decode"):
        bound_batches()


def refused(value: bytes, models: dict[str, LoadedModel] = MODELS) -> BadRecord:
    read = parse(value, "demo", 3, 0, models)
    assert not isinstance(read, BatchItem)
    return read


def test_such_a_record_is_refused_with_the_reason() -> None:
    bad = refused(UnreadableBatch("records 1 to 3 cannot be read: why"))
    assert (bad.error.status, bad.error.code) == (400, "unreadable_batch")
    assert bad.error.message == "records 1 to 3 cannot be read: why"
    assert bad.source.offset == 3


def test_a_record_that_was_sent_compressed_may_be_no_larger_than_another() -> None:
    bad = refused(b'{"prompt": "' + b"a" * (8 << 20) + b'"}')
    assert (bad.error.status, bad.error.code) == (413, "record_too_large")
