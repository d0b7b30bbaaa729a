"""Which prefixes a worker has cached, in a few KiB that all can read.

A prompt's keys are hashes of its first tokens at a fixed few depths. A worker puts the keys of what it has
cached into a Bloom filter (Bloom: "Space/Time Trade-offs in Hash Coding with Allowable Errors", CACM 13(7),
1970) and tells it in its heartbeat; admission looks a request's keys up in it, the shallowest first. What is
said wrongly costs a poor choice of worker and nothing else: what a request may find is decided by the full
block hashes (workers/block_hash.py).
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b

# In tokens: two depths for each doubling, so a hit is told at least two thirds of its length. What is
# shorter is computed in less time than a choice is worth; what is longer than the last shares it mostly.
DEPTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# 8 bits a key: 2.4 % of unknown keys are thought known, and a false one at depth n needs all before it.
MAX_KEYS = 4096
_BITS = 8 * MAX_KEYS
_MASK = _BITS - 1
SKETCH_BYTES = 1 + _BITS // 8
_BY_TENANT, _SHARED = b"\x01", b"\x02"


def prefix_keys(token_ids: Sequence[int], salt: str, start: int = 0) -> list[int]:
    """64-bit keys of all DEPTHS above `start` (tokens) that the ids reach, the shallowest first.

    `salt` is the tenant, or empty where all share their caches. 20 µs for 1,000 tokens, 100 µs for 4,096 and
    more. Raises ValueError for an id that is not in 0 … 2³² - 1.
    """
    length = len(token_ids)
    if length < DEPTHS[0]:
        return []
    used = token_ids[: DEPTHS[-1]]
    try:
        packed = struct.pack(f"<{len(used)}I", *used)
    except struct.error as error:
        raise ValueError(f"token ids must be in 0 … 2³² - 1: {error}") from error
    state = blake2b(salt.encode(), digest_size=8, person=b"headrace-prefix")
    state.update(b"\x00")
    view, done, keys = memoryview(packed), 0, []
    for depth in DEPTHS:
        if depth > length:
            break
        state.update(view[4 * done : 4 * depth])
        done = depth
        if depth > start:
            keys.append(int.from_bytes(state.digest(), "little"))
    return keys


def make_sketch(keys: Iterable[int], *, shared: bool) -> bytes:
    """SKETCH_BYTES that hold the keys, MAX_KEYS of them at most or it says too much is known."""
    bits = bytearray(_BITS // 8)
    for key in keys:
        for _ in range(4):
            bits[(key & _MASK) >> 3] |= 1 << (key & 7)
            key >>= 16
    return (_SHARED if shared else _BY_TENANT) + bytes(bits)


def is_shared(sketch: bytes) -> bool:
    """Whether its keys are salted with no tenant."""
    return sketch[:1] == _SHARED


def places(key: int) -> tuple[int, int, int, int, int, int, int, int]:
    """Where a key's four bits lie in a sketch: byte, mask, byte, mask, …"""
    a, b, c, d = key & _MASK, key >> 16 & _MASK, key >> 32 & _MASK, key >> 48 & _MASK
    return (
        1 + (a >> 3),
        1 << (a & 7),
        1 + (b >> 3),
        1 << (b & 7),
        1 + (c >> 3),
        1 << (c & 7),
        1 + (d >> 3),
        1 << (d & 7),
    )


def holds(sketch: bytes, key: int) -> bool:
    """Whether the key is among those of a sketch of SKETCH_BYTES, or seems so."""
    at = places(key)
    return all(sketch[byte] & mask for byte, mask in zip(at[::2], at[1::2], strict=True))
