"""Which copies take a sequence's KV from one rank of prefill to the ranks of decode, layer by layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schemas.kv_layout import KVLayout
from schemas.records import PoolRank, Reserved
from workers.handoff.kv_pool import KVPool
from workers.handoff.layout import Piece, Place, RankPool, pieces
from workers.handoff.transport import Copy


@dataclass(frozen=True, slots=True)
class Target:
    """One rank of decode: its pools, and the sequence's blocks in them."""

    place: Place
    rank: PoolRank


def targets(reserved: Reserved) -> list[Target]:
    """The ranks that a Reserved names."""
    return [
        Target(
            Place(
                RankPool(reserved.layout, rank, pool.num_blocks),
                reserved.block_ids,
                reserved.num_cached_tokens,
            ),
            pool,
        )
        for rank, pool in enumerate(reserved.ranks)
    ]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the transport."""

    segment: str
    copies: list[Copy]
    num_bytes: int


def calls(
    pool: KVPool,
    block_ids: Sequence[int],
    targets: Sequence[Target],
    tokens: range,
    layers: range,
    max_bytes: int,
    max_copies: int,
) -> Iterator[Call]:
    """What writes `tokens` (none that decode has) of `layers`: several blocks a call, bounded by both limits,
    but for a single copy that is larger than one. Raises IndexError for tokens without blocks."""
    source = Place(pool.shape, block_ids)
    for target in targets:
        plan = pieces(source, target.place, tokens.start, tokens.stop)
        copies: list[Copy] = []
        num_bytes = 0
        for copy in _copies(pool, target, plan, layers):
            if copies and (num_bytes + copy.length > max_bytes or len(copies) >= max_copies):
                yield Call(target.rank.segment, copies, num_bytes)
                copies, num_bytes = [], 0
            copies.append(copy)
            num_bytes += copy.length
        if copies:
            yield Call(target.rank.segment, copies, num_bytes)


def _copies(pool: KVPool, target: Target, plan: Sequence[Piece], layers: range) -> Iterator[Copy]:
    ours, theirs = pool.shape.layer_bytes, target.place.pool.layer_bytes
    sides = (
        (pool.keys_address, target.rank.keys_address),
        (pool.values_address, target.rank.values_address),
    )
    for layer in layers:
        for source, to in sides:
            for piece in plan:
                yield Copy(
                    source + layer * ours + piece.source, to + layer * theirs + piece.target, piece.length
                )


def written_bytes(layout: KVLayout, num_tokens: int) -> int:
    """KV bytes of tokens over all layers and ranks: what a transfer moves."""
    pool = RankPool(layout, 0, 1)
    return 2 * layout.num_layers * layout.num_kv_heads * pool.head_bytes * num_tokens
