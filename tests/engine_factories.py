"""Engine parts with defaults for tests, and the invariants that hold between any two steps."""

from collections import Counter
from collections.abc import Set
from typing import Any

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.block_pool import BlockPool
from workers.engine import Engine
from workers.kv_cache_manager import KVCacheManager
from workers.request import Request, RequestStatus
from workers.scheduler import Scheduler, SchedulerConfig
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
    **sampling: Any,
) -> Request:
    return Request(
        request_id=request_id(number),
        attempt=attempt,
        priority=priority,
        prompt_token_ids=[100 + number % 100] * prompt_len,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        reply_partition=reply_partition,
        output_token_ids=output_token_ids or [],
    )


def make_config(**limits: int) -> SchedulerConfig:
    return SchedulerConfig(**{"max_model_len": 4096, **limits})


def make_scheduler(
    num_blocks: int = 1000, eos_token_ids: Set[int] = frozenset({EOS}), **limits: int
) -> Scheduler:
    return Scheduler(make_config(**limits), KVCacheManager(BlockPool(num_blocks)), eos_token_ids)


def make_runner(step_ms: float = 0.0, vocab_size: int = 1000) -> SimulatedRunner:
    return SimulatedRunner(vocab_size=vocab_size, first_token_id=2, eos_token_ids={EOS}, step_ms=step_ms)


def make_engine(num_blocks: int = 1000, step_ms: float = 0.0, **limits: int) -> Engine:
    return Engine(make_config(**limits), make_runner(step_ms), num_blocks, {EOS})


def check_invariants(scheduler: Scheduler, requests: list[Request]) -> None:
    """No block leaked or shared, counts balance, limits hold, and every request is where its status says."""
    pool = scheduler.kv_cache_manager.pool
    held = Counter(block for r in requests for block in r.block_table)
    assert all(pool.ref_cnt(block) == held[block] for block in range(pool.num_blocks))
    assert pool.num_free_blocks == pool.num_blocks - len(held)
    assert not held or max(held.values()) == 1

    by_status = Counter(r.status for r in requests)
    assert by_status[RequestStatus.RUNNING] == scheduler.num_running <= scheduler.config.max_num_seqs
    assert by_status[RequestStatus.WAITING] + by_status[RequestStatus.PREEMPTED] == scheduler.num_waiting
    for r in requests:
        if r.status is RequestStatus.RUNNING:
            assert r.num_computed_tokens < r.num_tokens
            assert len(r.block_table) * pool.block_size >= r.num_computed_tokens
        else:
            assert r.block_table == []
        num_tokens_at_arrival = len(r.prompt_token_ids) + r.num_resumed_tokens
        assert r.num_tokens <= max(scheduler.config.max_model_len, num_tokens_at_arrival)
