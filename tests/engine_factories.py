"""Engine parts with defaults for tests, and the invariants that hold between any two steps."""

from collections import Counter
from collections.abc import Set
from typing import Any

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.block_hash import BlockHasher, PrefixSharing
from workers.engine import Engine
from workers.kv_cache_manager import KVCacheManager, make_kv_cache_manager
from workers.preemption import SwapCost
from workers.request import Request, RequestStatus
from workers.scheduler import Scheduler
from workers.scheduler_config import SchedulerConfig
from workers.simulated_runner import SimulatedRunner

EOS = 1


def request_id(number: int) -> bytes:
    return number.to_bytes(16, "big")[::-1]


def make_request(
    number: int = 1,
    *,
    prompt_len: int = 8,
    max_tokens: int = 4,
    attempt: int = 1,
    priority: PriorityClass = PriorityClass.INTERACTIVE,
    reply_partition: int = 0,
    output_token_ids: list[int] | None = None,
    prompt_token_ids: list[int] | None = None,
    expected_output_tokens: int | None = None,
    tenant: str = "",
    **sampling: Any,
) -> Request:
    return Request(
        request_id=request_id(number),
        attempt=attempt,
        priority=priority,
        prompt_token_ids=prompt_token_ids or [100 + number % 100] * prompt_len,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        reply_partition=reply_partition,
        output_token_ids=output_token_ids or [],
        expected_output_tokens=expected_output_tokens,
        tenant=tenant,
    )


def make_config(**limits: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"max_model_len": 4096, **limits})


def make_kv(num_blocks: int = 1000, num_host_blocks: int = 0, sharing: str = "off") -> KVCacheManager:
    hasher = None if sharing == "off" else BlockHasher("model", "layout", PrefixSharing(sharing))
    return make_kv_cache_manager(num_blocks, num_host_blocks=num_host_blocks, hasher=hasher)


def make_scheduler(
    num_blocks: int = 1000,
    eos_token_ids: Set[int] = frozenset({EOS}),
    *,
    num_host_blocks: int = 0,
    sharing: str = "off",
    swap_bytes_per_s: float = 1e9,
    **limits: Any,
) -> Scheduler:
    cost = SwapCost(16 * 1024, swap_bytes_per_s) if num_host_blocks else None
    return Scheduler(
        make_config(**limits), make_kv(num_blocks, num_host_blocks, sharing), eos_token_ids, cost
    )


def make_runner(step_ms: float = 0.0, vocab_size: int = 1000) -> SimulatedRunner:
    return SimulatedRunner(vocab_size=vocab_size, first_token_id=2, eos_token_ids={EOS}, step_ms=step_ms)


def make_engine(
    num_blocks: int = 1000,
    step_ms: float = 0.0,
    *,
    num_host_blocks: int = 0,
    sharing: str = "off",
    **limits: Any,
) -> Engine:
    kv = make_kv(num_blocks, num_host_blocks, sharing)
    return Engine(make_config(**limits), make_runner(step_ms), kv, {EOS})


def check_invariants(scheduler: Scheduler, requests: list[Request]) -> None:
    """No block leaked, counts balance, limits hold, and every request is where its status says."""
    kv = scheduler.kv_cache_manager
    pool = kv.pool
    held = Counter(block for r in requests for block in r.block_table)
    assert all(pool.ref_cnt(block) == held[block] for block in range(pool.num_blocks))
    assert pool.num_free_blocks == pool.num_blocks - len(held)
    in_classes = [[r for r in scheduler.running if r.priority is priority] for priority in PriorityClass]
    assert scheduler.running.len_by_class() == tuple(map(len, in_classes))
    own = [sum(len(r.block_table) - r.num_shared_blocks for r in those) for those in in_classes]
    assert scheduler.running.own_blocks_by_class() == tuple(own)
    if kv.hasher is None:
        assert not held or max(held.values()) == 1
    host_held = Counter(block for r in requests for block in r.host_block_table)
    assert not host_held or max(host_held.values()) == 1
    if kv.host_pool is None:
        assert not host_held
    else:
        assert kv.host_pool.num_free_blocks == kv.host_pool.num_blocks - len(host_held)

    by_status = Counter(r.status for r in requests)
    assert by_status[RequestStatus.RUNNING] == scheduler.num_running <= scheduler.config.max_num_seqs
    assert by_status[RequestStatus.WAITING] + by_status[RequestStatus.PREEMPTED] == scheduler.num_waiting
    future_blocks = [0] * len(PriorityClass)
    for r in requests:
        assert len(set(r.block_table)) == len(r.block_table)
        if r.status is RequestStatus.RUNNING:
            assert r.num_computed_tokens < r.num_tokens
            # Blocks come with the tokens, not before.
            assert len(r.block_table) == kv.num_blocks_for(r.num_computed_tokens)
            assert r.num_expected_blocks >= len(r.block_table)
            future_blocks[r.priority] += r.num_expected_blocks - len(r.block_table)
        else:
            assert r.block_table == []
        if r.host_block_table:
            assert r.status is RequestStatus.PREEMPTED
            assert len(r.host_block_table) == kv.num_blocks_for(r.num_computed_tokens)
        elif r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            assert r.num_computed_tokens == 0
        num_tokens_at_arrival = len(r.prompt_token_ids) + r.num_resumed_tokens
        assert r.num_tokens <= max(scheduler.config.max_model_len, num_tokens_at_arrival)
    running = scheduler.running
    assert [running.future_blocks(c) for c in PriorityClass] == [
        sum(future_blocks[: c + 1]) for c in PriorityClass
    ]
