"""What a heartbeat says of a worker's engine. Pure."""

from schemas.records import ClassLoad, WorkerStatus
from workers.engine_stats import EngineStats
from workers.runners import LoadedEngine


def worker_status(
    loaded: LoadedEngine,
    stats: EngineStats,
    *,
    draining: bool,
    step_age_s: float,
    canary: str,
    prefix_sketch: bytes,
) -> WorkerStatus:
    return WorkerStatus(
        model=loaded.spec.id,
        max_model_len=loaded.max_model_len,
        draining=draining,
        num_blocks=stats.num_blocks,
        free_blocks=stats.free_blocks,
        block_size=loaded.engine.pool.block_size,
        max_num_seqs=loaded.engine.scheduler.config.max_num_seqs,
        num_running=stats.num_running,
        num_waiting=list(stats.num_waiting),
        queued_prefill_tokens=sum(stats.uncomputed_tokens),
        mailbox_offsets=list(stats.read_offsets),
        step_age_ms=int(step_age_s * 1000),
        step_time_ms=stats.step_time_ms,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_tokens_per_s=stats.decode_tokens_per_s,
        canary=canary,
        prefix_sketch=prefix_sketch,
        by_class=list(map(ClassLoad, stats.num_running_by_class, stats.own_blocks, stats.uncomputed_tokens)),
        num_gpus=loaded.num_gpus,
    )
