"""One rank's KV pools as bytes: their addresses for the transfer engine, and checks of what they hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from schemas.kv_layout import KVLayout
from schemas.records import ContentCheck
from workers.handoff.content import samples
from workers.handoff.layout import Heads, Place, RankPool

_DIGEST_BYTES = 8

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of one rank: each uint8 [num_layers, num_blocks, block_size, heads, head_bytes]."""

    shape: RankPool
    keys: Bytes
    values: Bytes

    @classmethod
    def of(cls, shape: RankPool, keys: Bytes, values: Bytes) -> "KVPool":
        """Views of the same memory.

        Raises ValueError for arrays that are not as large as `shape` says, or not in one piece: their
        addresses would be somebody else's.
        """
        sizes = (
            shape.layout.num_layers,
            shape.num_blocks,
            shape.layout.block_size,
            shape.heads.count,
            shape.head_bytes,
        )
        for name, array in (("keys", keys), ("values", values)):
            if array.dtype != np.uint8 or not array.flags.c_contiguous or array.nbytes != shape.pool_bytes:
                raise ValueError(
                    f"{name}: {array.nbytes} bytes of {array.dtype}, not {shape.pool_bytes} of uint8"
                )
        return cls(shape, keys.reshape(sizes), values.reshape(sizes))

    @property
    def keys_address(self) -> int:
        return self.keys.ctypes.data

    @property
    def values_address(self) -> int:
        return self.values.ctypes.data

    def read(self, place: Place, layer: int, values: bool, tokens: range, heads: Heads) -> bytes:
        """What `tokens` of the sequence at `place` have of `heads`, which are the rank's.

        Raises IndexError for a token without a block.
        """
        pool = (self.values if values else self.keys)[layer]
        first = heads.first - self.shape.heads.first
        parts, token = [], tokens.start
        block_size = self.shape.layout.block_size
        while token < tokens.stop:
            _, left = place.offset(token)
            run = min(left, tokens.stop - token)
            block = place.block_ids[(token - place.first_token) // block_size]
            within = block_size - left
            parts.append(pool[block, within : within + run, first : first + heads.count].tobytes())
            token += run
        return b"".join(parts)


def content_checks(
    pool: KVPool,
    place: Place,
    layout: KVLayout,
    first_token: int,
    num_tokens: int,
    *,
    all_of_it: bool = False,
) -> list[ContentCheck]:
    """Of what this rank of prefill sent: digests of the sampled blocks of decode's `layout`, whose first one
    begins at `first_token`, for each piece of heads that one rank of decode has. `all_of_it`: of every block
    in every layer."""
    if not pool.shape.sends:
        return []
    pieces = sorted(
        {
            (overlap.first, overlap.count)
            for rank in range(layout.tp_degree)
            if (overlap := pool.shape.heads.overlap(RankPool(layout, rank, 1).heads))
        }
    )
    num_blocks = -(-(num_tokens - first_token) // layout.block_size)
    checks = []
    for block, layer, values in samples(num_blocks, layout.num_layers, all_of_it=all_of_it):
        tokens = _tokens_of(block, layout.block_size, first_token, num_tokens)
        for first, count in pieces:
            found = digest(pool.read(place, layer, values, tokens, Heads(first, count)))
            checks.append(ContentCheck(layer, values, block, first, count, found))
    return checks


def compare(pool: KVPool, place: Place, num_tokens: int, checks: Sequence[ContentCheck]) -> str:
    """What is wrong with a rank's blocks at `place` (up to `num_tokens`): nothing, if each block has checks
    for all heads of the rank and all agree."""
    layout, own = pool.shape.layout, pool.shape.heads
    checked: dict[int, set[int]] = {block: set() for block in range(len(place.block_ids))}
    for check in _of_rank(checks, own):
        if check.block not in checked or not 0 <= check.layer < layout.num_layers:
            return "content: a check of what was not reserved"
        tokens = _tokens_of(check.block, layout.block_size, place.first_token, num_tokens)
        heads = Heads(check.first_head, check.num_heads)
        if digest(pool.read(place, check.layer, check.values, tokens, heads)) != check.digest:
            part = "values" if check.values else "keys"
            return f"content: {part} of layer {check.layer}, block {check.block} are not what was sent"
        checked[check.block].update(range(heads.first, heads.first + heads.count))
    for block, heads_checked in checked.items():
        if len(heads_checked) != own.count:
            return f"content: block {block} is not checked for all heads"
    return ""


def digest(data: bytes) -> bytes:
    """Of a ContentCheck."""
    return blake2b(data, digest_size=_DIGEST_BYTES, person=b"headrace-kv").digest()


def _of_rank(checks: Sequence[ContentCheck], own: Heads) -> Iterator[ContentCheck]:
    for check in checks:
        if own.first <= check.first_head and check.first_head + check.num_heads <= own.first + own.count:
            yield check


def _tokens_of(block: int, block_size: int, first_token: int, num_tokens: int) -> range:
    start = first_token + block * block_size
    return range(start, min(start + block_size, num_tokens))
