"""Pools with real bytes for handoffs: filled with what each token of a sequence has, whatever the layout."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from schemas.kv_layout import KVLayout
from schemas.records import PoolRank, Reserved
from workers.handoff.kv_pool import KVPool
from workers.handoff.layout import Place, RankPool
from workers.handoff.transport import Transport

TRANSFER = b"t" * 16


def layout(block_size: int = 16, tp_degree: int = 1, num_kv_heads: int = 4) -> KVLayout:
    return KVLayout(block_size, "bfloat16", tp_degree, 3, num_kv_heads, 8)


def token_kv(shape: KVLayout, num_tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a sequence: uint8 [num_layers, num_tokens, num_kv_heads, head_bytes]."""
    random = np.random.default_rng(seed)
    size = (shape.num_layers, num_tokens, shape.num_kv_heads, shape.head_dim * 2)
    keys, values = (random.integers(0, 256, size, np.uint8) for _ in range(2))
    return keys, values


@dataclass
class Side:
    """One worker: a pool and a transport for each rank."""

    layout: KVLayout
    num_blocks: int
    pools: list[KVPool]
    transports: list[Transport]

    @classmethod
    def open(cls, shape: KVLayout, num_blocks: int, join: Callable[[int], Transport]) -> "Side":
        pools, transports = [], []
        for rank in range(shape.tp_degree):
            rank_pool = RankPool(shape, rank, num_blocks)
            keys, values = (np.full(rank_pool.pool_bytes, fill, np.uint8) for fill in (0xEE, 0xDD))
            pools.append(KVPool.of(rank_pool, keys, values))
            transports.append(join(rank))
            for memory in (keys, values):
                transports[-1].register(memory)
        return cls(shape, num_blocks, pools, transports)

    def fill(self, block_ids: list[int], kv: tuple[np.ndarray, np.ndarray]) -> None:
        """As the model would have written it."""
        for pool in self.pools:
            heads = slice(pool.shape.heads.first, pool.shape.heads.first + pool.shape.heads.count)
            for token in range(kv[0].shape[1]):
                index, within = divmod(token, self.layout.block_size)
                for array, tokens in zip((pool.keys, pool.values), kv, strict=True):
                    array[:, block_ids[index], within] = tokens[:, token, heads]

    def holds(self, block_ids: list[int], kv: tuple[np.ndarray, np.ndarray], first: int = 0) -> bool:
        """Whether the tokens from `first` on, with which `block_ids` begin, are there on every rank."""
        for pool in self.pools:
            heads = slice(pool.shape.heads.first, pool.shape.heads.first + pool.shape.heads.count)
            for token in range(first, kv[0].shape[1]):
                index, within = divmod(token - first, self.layout.block_size)
                for array, tokens in zip((pool.keys, pool.values), kv, strict=True):
                    if (array[:, block_ids[index], within] != tokens[:, token, heads]).any():
                        return False
        return True

    def untouched(self, block_ids: list[int]) -> bool:
        """Whether all other blocks are as they were in the beginning."""
        others = [block for block in range(self.num_blocks) if block not in block_ids]
        return all(
            bool((pool.keys[:, others] == 0xEE).all() and (pool.values[:, others] == 0xDD).all())
            for pool in self.pools
        )

    def reserved(self, block_ids: list[int], num_cached_tokens: int = 0, epoch: int = 22) -> Reserved:
        ranks = [
            PoolRank(transport.segment, pool.keys_address, pool.values_address, self.num_blocks)
            for pool, transport in zip(self.pools, self.transports, strict=True)
        ]
        return Reserved(
            TRANSFER, b"r" * 16, 1, 0, 11, 1, epoch, num_cached_tokens, block_ids, self.layout, ranks
        )

    def places(self, block_ids: list[int], first_token: int) -> list[Place]:
        return [Place(pool.shape, block_ids, first_token) for pool in self.pools]


def some_blocks(random: Random, num_tokens: int, block_size: int, num_blocks: int) -> list[int]:
    return random.sample(range(num_blocks), -(-num_tokens // block_size))
