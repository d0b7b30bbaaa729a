"""How a worker's KV pools lie in memory: a record, part of heartbeats and handoffs. See records.py."""

from dataclasses import dataclass


@dataclass(slots=True)
class KVLayout:
    block_size: int
    dtype: str
    tp_degree: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    arithmetic: str = "fast"
