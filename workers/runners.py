"""Makes the engine that the configuration asks for. The only place that knows all kinds of runners."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.catalog import CANARY_MAX_TOKENS, Catalog, CatalogError, ModelSpec
from schemas.handoff_records import WorkerRole
from schemas.tokenization import Tokenizer
from workers.batch import ModelRunner
from workers.block_hash import BlockHasher, PrefixSharing
from workers.block_pool import num_blocks_for
from workers.canary import CANARY_REQUEST_ID, NUM_LEARNED_TOKENS, Canary
from workers.config import NO_PREFIX_CACHING, WorkerConfig
from workers.device import SETTING as DEVICE_SETTING
from workers.device import choose_device, choose_fp8_kv
from workers.device_pools import plan_device_pools
from workers.engine import Engine
from workers.handoff.kv_access import KVAccess, open_kv
from workers.kv_cache_manager import make_kv_cache_manager
from workers.memory import available_bytes
from workers.memory_profile import ProfiledRunner, profile_memory
from workers.pool_sizes import MIB, PoolSizes, plan_pools
from workers.rank_died import RankDiedError
from workers.rank_settings import RanksError, origin
from workers.scheduler_config import SchedulerConfig
from workers.simulated_runner import SimulatedRunner
from workers.text_rules import TextRules

if TYPE_CHECKING:
    from workers.model_runner import TorchModelRunner

log = logging.getLogger(__name__)

# Of a real vocabulary, the first ids are control and byte tokens.
_FIRST_TEXT_TOKEN = 1000
_PRINTABLE_BYTES = (32, 127)
# For models that come without a canary: a text that most of them go on with in one way.
_CANARY_TEXT = "A B C D E F"


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A warm engine, and what others must know of its model. `vocab_size`: token ids are below it.

    `text_rules` are for its requests. `canary` has not run yet; None if the settings want none. `num_gpus`
    is 1 without any: the machine. `kv` is what others reach of a worker that is not unified.
    """

    engine: Engine
    spec: ModelSpec
    max_model_len: int
    vocab_size: int
    text_rules: TextRules
    canary: Canary | None
    num_gpus: int
    kv: KVAccess | None = None


def load_engine(
    config: WorkerConfig, on_rank_died: Callable[[RankDiedError], None] = lambda error: None
) -> LoadedEngine:
    """Loads the model, allocates the KV pool, runs one request. Takes seconds: not for an event loop.

    `on_rank_died` is called once, from another thread, when a rank of the model has ended.

    Raises CatalogError or ValueError saying what does not fit, OSError for a file that cannot be read, and
    where KV is handed over TransferEngineMissingError or TransferError.
    """
    catalog = Catalog.load(config.models_dir)
    spec = catalog.get(config.model_id(catalog))
    tokenizer = Tokenizer.load(catalog, spec.id)
    runner: ModelRunner
    on_gpu = False
    arithmetic = "deterministic" if config.deterministic else "fast"
    num_ranks = config.num_ranks(spec)
    if config.runner == "simulated":
        scheduler_config = config.scheduler_config(spec.max_model_len)
        vocab_size = len(tokenizer.token_bytes)
        runner = _simulated_runner(config, spec, vocab_size)
        pools = _simulated_pools(config, runner)
    else:
        if not spec.weights:
            raise CatalogError(f"model {spec.id!r} has no weights: it needs HEADRACE_RUNNER=simulated")
        # Takes seconds and hundreds of MiB, which a simulated worker does not need.
        import torch

        from kernels.dispatch import has_fp8
        from kernels.toolchain import launcher_problem
        from workers.model_runner import TorchModelRunner

        device = choose_device(config.device, torch.cuda.is_available(), deterministic=config.deterministic)
        on_gpu = device is not None
        if on_gpu and config.role is not WorkerRole.UNIFIED:
            raise ValueError(
                f"HEADRACE_WORKER_ROLE is {config.role}: GPUs hand no KV over yet; set it to unified, or "
                f"{DEVICE_SETTING} to cpu"
            )
        if on_gpu and (problem := launcher_problem(os.environ)):
            raise ValueError(f"{problem}; or set {DEVICE_SETTING} to cpu")
        fp8_kv = config.kv_dtype == "fp8"
        if on_gpu:
            fp8_kv = choose_fp8_kv(config.kv_dtype, spec, has_fp8=has_fp8(torch.device("cuda", 0)))
            arithmetic = "cuda fp8" if fp8_kv else "cuda bf16"
        log.info("serving on %s", "CUDA" if on_gpu else "the CPU")
        scheduler_config = config.scheduler_config(spec.max_model_len, on_gpu=on_gpu)
        try:
            runner = TorchModelRunner(
                catalog.weights_path(spec),
                max_model_len=scheduler_config.max_model_len,
                max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
                max_num_seqs=scheduler_config.max_num_seqs,
                deterministic=config.deterministic,
                num_threads=config.threads,
                linear=config.linear,
                num_ranks=num_ranks,
                step_timeout_s=config.stall_exit_s,
                on_rank_died=on_rank_died,
                eos_token_ids=frozenset(spec.eos_token_ids),
                device=device,
                fp8_kv=fp8_kv,
            )
        except RanksError as error:
            raise RanksError(f"{error}{origin(config.tensor_parallel, spec)}") from None
        vocab_size = runner.vocab_size
        if on_gpu:
            pools = _pools_on_gpus(config, scheduler_config, runner, num_ranks)
        else:
            pools = _pools_in_memory(config, scheduler_config, runner, vocab_size, num_ranks)
    kv_cache_manager = make_kv_cache_manager(
        pools.num_blocks,
        num_host_blocks=pools.num_host_blocks,
        hasher=_block_hasher(config, spec, runner, arithmetic),
    )
    engine = Engine(scheduler_config, runner, kv_cache_manager, frozenset(spec.eos_token_ids))
    if on_gpu:
        _record_graphs(runner, scheduler_config)
    engine.warm_up(token_id=spec.bos_token_id)
    return LoadedEngine(
        engine,
        spec,
        scheduler_config.max_model_len,
        vocab_size,
        TextRules(tokenizer, vocab_size, spec.eos_token_ids),
        _canary(tokenizer, spec, runner) if config.canary_s else None,
        num_ranks if on_gpu else config.num_gpus,
        None if config.role is WorkerRole.UNIFIED else open_kv(config, runner, pools.num_blocks),
    )


def _pools_in_memory(
    config: WorkerConfig,
    scheduler_config: SchedulerConfig,
    runner: ProfiledRunner,
    vocab_size: int,
    num_ranks: int,
) -> PoolSizes:
    profile = profile_memory(
        runner,
        scheduler_config,
        vocab_size,
        tiled=config.deterministic,
        num_ranks=num_ranks,
    )
    pools = plan_pools(
        profile,
        kv_memory_mib=config.kv_memory_mib,
        swap_memory_mib=config.swap_memory_mib,
        bytes_per_block=runner.bytes_per_block,
    )
    log.info(
        "memory",
        extra={
            "available_mib": profile.available_bytes // MIB,
            "step_peak_mib": profile.peak_bytes // MIB,
            "kv_mib": pools.num_blocks * runner.bytes_per_block // MIB,
            "swap_mib": pools.num_host_blocks * runner.bytes_per_block // MIB,
        },
    )
    return pools


def _pools_on_gpus(
    config: WorkerConfig, scheduler_config: SchedulerConfig, runner: "TorchModelRunner", num_ranks: int
) -> PoolSizes:
    import torch

    from kernels.tuned import tuning_note
    from workers.device_profile import profile_device_memory

    log.info(tuning_note(torch.cuda.get_device_name(runner.device)))
    profile = profile_device_memory(runner, scheduler_config)
    pools = plan_device_pools(
        profile,
        host_bytes=available_bytes(),
        kv_memory_mib=config.kv_memory_mib,
        swap_memory_mib=config.swap_memory_mib,
        rank_bytes_per_block=runner.rank_bytes_per_block,
        num_ranks=num_ranks,
    )
    log.info(
        "memory of a GPU",
        extra={
            "free_mib": profile.free_bytes // MIB,
            "step_peak_mib": profile.peak_bytes // MIB,
            "kv_mib": pools.num_blocks * runner.rank_bytes_per_block // MIB,
        },
    )
    return pools


def _record_graphs(runner: ModelRunner, scheduler_config: SchedulerConfig) -> None:
    from workers.model_runner import TorchModelRunner

    assert isinstance(runner, TorchModelRunner)
    began = time.monotonic()
    # The canary has a seat beside them.
    runner.record_graphs(scheduler_config.max_num_seqs + 1)
    log.info("decode graphs recorded", extra={"seconds": round(time.monotonic() - began, 1)})


def _simulated_pools(config: WorkerConfig, runner: SimulatedRunner) -> PoolSizes:
    bytes_per_block = runner.bytes_per_block
    num_blocks = (
        runner.num_blocks_in_memory
        if config.kv_memory_mib is None
        else num_blocks_for(config.kv_memory_mib * MIB, bytes_per_block)
    )
    return PoolSizes(num_blocks, config.swap_memory_mib * MIB // bytes_per_block)


def _block_hasher(
    config: WorkerConfig, spec: ModelSpec, runner: ModelRunner, arithmetic: str
) -> BlockHasher | None:
    if config.prefix_caching == NO_PREFIX_CACHING:
        return None
    layout = f"{config.runner} {arithmetic} {runner.bytes_per_block}"
    return BlockHasher(spec.id, layout, PrefixSharing(config.prefix_caching))


def _canary(tokenizer: Tokenizer, spec: ModelSpec, runner: ModelRunner) -> Canary:
    if isinstance(runner, SimulatedRunner):
        known = [runner.token_at(CANARY_REQUEST_ID, position) for position in range(NUM_LEARNED_TOKENS)]
        return Canary([spec.bos_token_id], known)
    if spec.canary is not None:
        return Canary(spec.canary.prompt_token_ids, spec.canary.output_token_ids)
    prompt = tokenizer.encode_prompt(_CANARY_TEXT)
    return Canary(prompt[: CANARY_MAX_TOKENS - NUM_LEARNED_TOKENS])


def _simulated_runner(config: WorkerConfig, spec: ModelSpec, vocab_size: int) -> SimulatedRunner:
    first, end = (_FIRST_TEXT_TOKEN, vocab_size) if vocab_size > 2 * _FIRST_TEXT_TOKEN else _PRINTABLE_BYTES
    return SimulatedRunner(
        vocab_size=end,
        first_token_id=first,
        eos_token_ids=frozenset(spec.eos_token_ids),
        mask_size=vocab_size,
        step_ms=config.step_ms,
        roofline=config.roofline(),
        speed=config.simulated_speed,
        hands_over=config.role is not WorkerRole.UNIFIED,
    )
