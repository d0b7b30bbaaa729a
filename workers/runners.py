"""Makes the engine that the configuration asks for. The only place that knows all kinds of runners."""

from dataclasses import dataclass

from schemas.catalog import CANARY_MAX_TOKENS, Catalog, CatalogError, ModelSpec
from schemas.tokenization import Tokenizer
from workers.batch import ModelRunner
from workers.block_pool import num_blocks_for
from workers.canary import CANARY_REQUEST_ID, NUM_LEARNED_TOKENS, Canary
from workers.config import WorkerConfig
from workers.engine import Engine
from workers.kv_cache_manager import make_kv_cache_manager
from workers.simulated_runner import SimulatedRunner

# Of a real vocabulary, the first ids are control and byte tokens.
_FIRST_TEXT_TOKEN = 1000
_PRINTABLE_BYTES = (32, 127)
# For models that come without a canary: a text that most of them go on with in one way.
_CANARY_TEXT = "A B C D E F"


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A warm engine, and what others must know of its model. `vocab_size`: token ids are below it.

    `canary` has not run yet; None if the settings want none.
    """

    engine: Engine
    spec: ModelSpec
    max_model_len: int
    vocab_size: int
    canary: Canary | None


def load_engine(config: WorkerConfig) -> LoadedEngine:
    """Loads the model, allocates the KV pool, runs one request. Takes seconds: not for an event loop.

    Raises CatalogError or ValueError saying what does not fit, OSError for a file that cannot be read.
    """
    catalog = Catalog.load(config.models_dir)
    spec = catalog.get(config.model_id(catalog))
    scheduler_config = config.scheduler_config(spec.max_model_len)
    runner: ModelRunner
    if config.runner == "simulated":
        runner, vocab_size = _simulated_runner(config, catalog, spec)
    else:
        if not spec.weights:
            raise CatalogError(f"model {spec.id!r} has no weights: it needs HEADRACE_RUNNER=simulated")
        # Takes seconds and hundreds of MiB, which a simulated worker does not need.
        from workers.model_runner import TorchModelRunner

        runner = TorchModelRunner(
            catalog.weights_path(spec),
            max_model_len=scheduler_config.max_model_len,
            deterministic=config.deterministic,
            num_threads=config.threads,
        )
        vocab_size = runner.vocab_size
    if config.kv_memory_mib is None and isinstance(runner, SimulatedRunner):
        num_blocks = runner.num_blocks_in_memory
    else:
        num_blocks = num_blocks_for((config.kv_memory_mib or 512) << 20, runner.bytes_per_block)
    kv_cache_manager = make_kv_cache_manager(num_blocks)
    engine = Engine(scheduler_config, runner, kv_cache_manager, frozenset(spec.eos_token_ids))
    engine.warm_up(token_id=spec.bos_token_id)
    return LoadedEngine(
        engine,
        spec,
        scheduler_config.max_model_len,
        vocab_size,
        _canary(catalog, spec, runner) if config.canary_s else None,
    )


def _canary(catalog: Catalog, spec: ModelSpec, runner: ModelRunner) -> Canary:
    if isinstance(runner, SimulatedRunner):
        known = [runner.token_at(CANARY_REQUEST_ID, position) for position in range(NUM_LEARNED_TOKENS)]
        return Canary([spec.bos_token_id], known)
    if spec.canary is not None:
        return Canary(spec.canary.prompt_token_ids, spec.canary.output_token_ids)
    prompt = Tokenizer.load(catalog, spec.id).encode_prompt(_CANARY_TEXT)
    return Canary(prompt[: CANARY_MAX_TOKENS - NUM_LEARNED_TOKENS])


def _simulated_runner(config: WorkerConfig, catalog: Catalog, spec: ModelSpec) -> tuple[SimulatedRunner, int]:
    vocab_size = len(Tokenizer.load(catalog, spec.id).token_bytes)
    first, end = (_FIRST_TEXT_TOKEN, vocab_size) if vocab_size > 2 * _FIRST_TEXT_TOKEN else _PRINTABLE_BYTES
    runner = SimulatedRunner(
        vocab_size=end,
        first_token_id=first,
        eos_token_ids=frozenset(spec.eos_token_ids),
        step_ms=config.step_ms,
        roofline=config.roofline(),
        speed=config.simulated_speed,
    )
    return runner, vocab_size
