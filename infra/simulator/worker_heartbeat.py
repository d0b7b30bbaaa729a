"""What the heartbeat of a simulated worker says."""

from typing import NamedTuple

from infra.simulator.scenario import Model, Workers, kv_layout
from infra.simulator.worker_handoffs import WorkerHandoffs
from schemas.records import ClassLoad, WorkerStatus
from workers.scheduler import Scheduler
from workers.sketch_beat import SketchBeat


class Look(NamedTuple):
    """How it was when a step ended; all but `free_blocks` by class."""

    num_running: tuple[int, ...]
    num_waiting: tuple[int, ...]
    own_blocks: tuple[int, ...]
    free_blocks: int


class WorkerHeartbeat:
    """Of one run of a worker."""

    def __init__(
        self, model: Model, workers: Workers, scheduler: Scheduler, handoffs: WorkerHandoffs | None
    ) -> None:
        self._model, self._workers = model, workers
        self._scheduler = scheduler
        self._handoffs = handoffs
        self._kv_layout = kv_layout(model, workers)
        self._transfer_bytes_per_s = 0.0 if handoffs is None else workers.transfer_gb_s * 1e9
        self._sketch_beat = SketchBeat()

    def look(self) -> Look:
        """As it is now."""
        running, kv = self._scheduler.running, self._scheduler.kv_cache_manager
        return Look(
            running.len_by_class(),
            self._scheduler.num_waiting_by_class(),
            running.own_blocks_by_class(),
            kv.num_free_blocks,
        )

    def status(
        self, look: Look, uncomputed: tuple[int, ...], mailbox_offsets: list[int], now: float
    ) -> WorkerStatus:
        """`uncomputed`: tokens that all that run and wait lack, by class."""
        pool, meter = self._scheduler.kv_cache_manager.pool, self._scheduler.meter
        handoffs = self._handoffs
        return WorkerStatus(
            model=self._workers.model,
            max_model_len=self._model.max_model_len,
            draining=False,
            num_blocks=pool.num_blocks,
            free_blocks=look.free_blocks,
            block_size=pool.block_size,
            max_num_seqs=self._scheduler.config.max_num_seqs,
            num_running=sum(look.num_running) + (0 if handoffs is None else handoffs.num_kept),
            num_waiting=list(look.num_waiting),
            queued_prefill_tokens=sum(uncomputed),
            mailbox_offsets=list(mailbox_offsets),
            step_age_ms=0,
            step_time_ms=meter.step_s * 1000,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_tokens_per_s=meter.decode_tokens_per_s,
            canary="ok",
            prefix_sketch=self._sketch(now),
            by_class=list(map(ClassLoad, look.num_running, look.own_blocks, uncomputed)),
            num_gpus=self._workers.tensor_parallel,
            worker_role=self._workers.role,
            kv_layout=self._kv_layout,
            transfer_bytes_per_s=self._transfer_bytes_per_s,
            handoffs=[] if handoffs is None else handoffs.told(now),
        )

    def _sketch(self, now: float) -> bytes:
        """Which prefixes are cached, when it is time to say so."""
        kv = self._scheduler.kv_cache_manager
        if kv.prefix_index is None or kv.hasher is None or not self._sketch_beat.is_due(now):
            return b""
        return self._sketch_beat.sketch(kv.prefix_index.keys(), shared=kv.hasher.is_shared, now=now)
