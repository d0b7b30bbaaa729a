"""Which KV pools fit each other, and which bytes go where: block sizes and ranks may differ, numbers may not.

A pool is [num_layers, num_blocks, block_size, heads of the rank, head_dim], once for keys and once for
values. Ranks share the heads in order; where there are more ranks than heads, neighbours have the same one.
Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from schemas.kv_layout import KVLayout

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_MUST_BE_EQUAL = ("dtype", "arithmetic", "num_layers", "num_kv_heads", "head_dim")


def refusal(source: KVLayout, target: KVLayout) -> str:
    """Why KV of `source` cannot be used in `target`, naming the field; nothing if it can.

    Another block size is regrouped, another tp_degree is cut by heads. Another dtype or other kernels would
    give other tokens than the worker's own KV: refused, not converted.
    """
    for name in _MUST_BE_EQUAL:
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            return f"layout: {name} {ours} cannot become {theirs}"
    for side in (source, target):
        if side.dtype not in _ITEM_BYTES:
            return f"layout: dtype {side.dtype} is not known"
        if min(side.block_size, side.tp_degree, side.num_layers, side.num_kv_heads, side.head_dim) < 1:
            return "layout: a size below 1"
        if side.num_kv_heads % side.tp_degree and side.tp_degree % side.num_kv_heads:
            return f"layout: tp_degree {side.tp_degree} does not go with {side.num_kv_heads} KV heads"
    return ""


@dataclass(frozen=True, slots=True)
class Heads:
    """KV heads `first` … `first + count - 1` of the model."""

    first: int
    count: int

    def overlap(self, other: "Heads") -> "Heads | None":
        first = max(self.first, other.first)
        count = min(self.first + self.count, other.first + other.count) - first
        return Heads(first, count) if count > 0 else None


@dataclass(frozen=True, slots=True)
class RankPool:
    """One rank's pools: how they lie, without where."""

    layout: KVLayout
    rank: int
    num_blocks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.layout.tp_degree:
            raise ValueError(f"rank {self.rank} of {self.layout.tp_degree}")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")

    @property
    def heads(self) -> Heads:
        heads, ranks = self.layout.num_kv_heads, self.layout.tp_degree
        return Heads(self.rank * heads // ranks, max(1, heads // ranks))

    @property
    def sends(self) -> bool:
        """Of the ranks that have the same head, the first one sends it."""
        return self.rank * self.layout.num_kv_heads % self.layout.tp_degree == 0 or self.layout.tp_degree <= (
            self.layout.num_kv_heads
        )

    @property
    def head_bytes(self) -> int:
        """Of one head of one token."""
        return self.layout.head_dim * _ITEM_BYTES[self.layout.dtype]

    @property
    def token_bytes(self) -> int:
        """Of one token in one layer, keys or values."""
        return self.heads.count * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.layout.block_size * self.token_bytes

    @property
    def layer_bytes(self) -> int:
        """From one layer to the next."""
        return self.num_blocks * self.block_bytes

    @property
    def pool_bytes(self) -> int:
        """Of the keys, and of the values."""
        return self.layout.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """A sequence's blocks in a pool: the first one's first token is token `first_token` of the sequence."""

    pool: RankPool
    block_ids: Sequence[int]
    first_token: int = 0

    def offset(self, token: int) -> tuple[int, int]:
        """(byte of the token in a layer, how many tokens follow it in its block, itself included).

        Raises IndexError for a token outside of the blocks.
        """
        block_size = self.pool.layout.block_size
        index, within = divmod(token - self.first_token, block_size)
        if not 0 <= index < len(self.block_ids):
            raise IndexError(
                f"token {token} is not in {len(self.block_ids)} blocks from {self.first_token} on"
            )
        block = self.block_ids[index]
        if not 0 <= block < self.pool.num_blocks:
            raise IndexError(f"block {block} is not in a pool of {self.pool.num_blocks}")
        return block * self.pool.block_bytes + within * self.pool.token_bytes, block_size - within


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes, from `source` to `target` (bytes from the beginning of a layer's part of a pool)."""

    source: int
    target: int
    length: int


def pieces(source: Place, target: Place, start: int, end: int) -> list[Piece]:
    """What takes tokens start … end - 1 of one layer from one rank to another: the heads that both have.

    The fewest pieces that there are: neighbours at both ends are one. Raises IndexError for a token that one
    of them has no block for.
    """
    joined: list[Piece] = []
    for piece in _pieces(source, target, start, end):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source + last.length == piece.source
            and last.target + last.length == piece.target
        ):
            joined[-1] = Piece(last.source, last.target, last.length + piece.length)
        else:
            joined.append(piece)
    return joined


def _pieces(source: Place, target: Place, start: int, end: int) -> Iterator[Piece]:
    ours, theirs = source.pool, target.pool
    heads = ours.heads.overlap(theirs.heads)
    if heads is None or not ours.sends:
        return
    skip_ours = (heads.first - ours.heads.first) * ours.head_bytes
    skip_theirs = (heads.first - theirs.heads.first) * theirs.head_bytes
    row = heads.count * ours.head_bytes
    whole_rows = row == ours.token_bytes == theirs.token_bytes
    token = start
    while token < end:
        from_offset, from_run = source.offset(token)
        to_offset, to_run = target.offset(token)
        run = min(from_run, to_run, end - token)
        if whole_rows:
            yield Piece(from_offset, to_offset, run * row)
        else:
            for i in range(run):
                yield Piece(
                    from_offset + i * ours.token_bytes + skip_ours,
                    to_offset + i * theirs.token_bytes + skip_theirs,
                    row,
                )
        token += run
