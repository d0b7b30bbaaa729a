"""What both sides must agree on before bytes are believed: a name for what was computed, and where to look.

Pure.
"""

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from schemas.kv_layout import KVLayout

_CHECKSUM_BYTES = 16


def checksum(model: str, layout: KVLayout, token_ids: Sequence[int]) -> bytes:
    """Of the model, decode's layout, and all token ids whose KV is handed over. 16 bytes."""
    digest = blake2b(digest_size=_CHECKSUM_BYTES, person=b"headrace-handoff")
    sizes = (
        layout.block_size,
        layout.tp_degree,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        len(token_ids),
    )
    for text in (model, layout.dtype, layout.arithmetic):
        encoded = text.encode()
        digest.update(struct.pack("<I", len(encoded)))
        digest.update(encoded)
    digest.update(struct.pack(f"<{len(sizes)}Q", *sizes))
    digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
    return digest.digest()


class Sample(NamedTuple):
    """Block `block` (index into the reserved ones) in one layer, keys or values."""

    block: int
    layer: int
    values: bool


def samples(num_blocks: int, num_layers: int, *, all_of_it: bool = False) -> Iterator[Sample]:
    """What is compared: of every block one layer's keys or values at least, and of every layer's keys and
    values one block at least: max(num_blocks, 2 × num_layers) of num_blocks × 2 × num_layers. Or all."""
    num_parts = 2 * num_layers
    num_samples = max(num_blocks, num_parts) if num_blocks else 0
    if all_of_it:
        pairs = [(block, part) for block in range(num_blocks) for part in range(num_parts)]
    else:
        pairs = [(i % num_blocks, i % num_parts) for i in range(num_samples)]
    for block, part in pairs:
        yield Sample(block, part // 2, bool(part % 2))
