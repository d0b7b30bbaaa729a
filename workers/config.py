"""Everything a worker is told, and nothing it finds out by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas.catalog import SIMULATED_MODEL, Catalog, CatalogError, ModelSpec
from schemas.config import CommonConfig, ConfigError, from_env, setting
from schemas.handoff_records import WorkerRole
from workers.block_hash import PrefixSharing
from workers.block_pool import num_blocks_for
from workers.device import DEVICES as DEVICE_SETTINGS
from workers.device import KV_DTYPES, device_problem
from workers.pool_sizes import MIB
from workers.rank_settings import choose_ranks, origin, ranks_errors
from workers.roofline import DEVICES, MODELS, DType, Roofline
from workers.scheduler_config import (
    DEFAULT_MAX_NUM_SEQS,
    MOST_UNASKED_SEQS,
    SchedulerConfig,
    gpu_max_num_seqs,
)

RUNNERS = ("torch", "simulated")
LINEAR_MODES = ("auto", "int8", "weight_only", "bf16")  # as workers.models.linear_choice, without torch
TRANSFER_PROTOCOLS = ("tcp", "rdma")
NO_PREFIX_CACHING = "off"
PREFIX_CACHING = (*PrefixSharing, NO_PREFIX_CACHING)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(CommonConfig):
    model: str = setting("", doc="Catalogue id of the model to serve; empty: the only one there is.")
    runner: str = setting("torch", doc="torch, or simulated: tokens without a model.")
    worker_role: str = setting(
        "unified", doc="What it does of a request: unified (all of it), prefill (prompts), or decode."
    )
    transfer_host: str = setting(
        "127.0.0.1", doc="Name or address under which workers of other roles reach this one's KV."
    )
    transfer_protocol: str = setting("tcp", doc="How KV goes between workers with roles: tcp or rdma.")
    transfer_devices: str = setting("", doc="RDMA devices for that, with commas; empty: all there are.")
    device: str = setting(
        "auto", doc="What a model is computed on: cuda, cpu, or auto: CUDA if there is a GPU, else the CPU."
    )
    kv_dtype: str = setting(
        "auto",
        doc="What keys and values are stored in: on GPUs bf16, fp8, or auto: as the model's catalogue entry "
        "says, else bf16. On the CPU auto.",
    )
    deterministic: bool = setting(False, doc="Equal output whatever the batch; slower.")
    step_ms: float = setting(
        0.0, doc="Time of a simulated step in ms, whatever the batch; 0 is as fast as it goes."
    )
    simulated_gpu: str = setting(
        "", doc="GPU whose step times are simulated: h100, h200 or b200; empty: step_ms for each step."
    )
    simulated_tensor_parallel: int = setting(8, doc="GPUs that the simulated model is spread over.")
    simulated_model: str = setting("70b", doc="Size of the model on the simulated GPUs: 8b or 70b (Llama 3).")
    simulated_weight_dtype: str = setting("fp8", doc="What its weights are stored in: bf16 or fp8.")
    simulated_kv_dtype: str = setting("bf16", doc="What its keys and values are stored in: bf16 or fp8.")
    simulated_compute_dtype: str = setting("bf16", doc="What its matrices are multiplied in: bf16 or fp8.")
    simulated_speed: float = setting(
        1.0, doc="How many times faster than the simulated GPUs it goes; 0 is no delay at all."
    )
    linear: str = setting(
        "auto", doc="How the fast mode multiplies: auto (what is fastest here), int8, weight_only, or bf16."
    )
    tensor_parallel: int | None = setting(
        None,
        doc="Ranks that the model is spread over, each a process; one that dies ends the worker. Empty: as "
        "many as its catalogue entry says, else 1.",
    )
    threads: int | None = setting(
        None, doc="Threads of torch in each rank; empty: the ranks share the cores equally."
    )
    kv_memory_mib: int | None = setting(
        None,
        doc="Memory of the KV pool in MiB, a hard ceiling; empty: a quarter of what the start finds free, at "
        "most 512, or what GPUs have left.",
    )
    max_model_len: int | None = setting(None, doc="Tokens of one sequence; empty: the model's context.")
    max_num_seqs: int | None = setting(
        None,
        doc=f"Sequences in the running batch; empty: {DEFAULT_MAX_NUM_SEQS}, on GPUs {MOST_UNASKED_SEQS} or "
        "half of max_num_batched_tokens, on simulated ones no more than their KV holds.",
    )
    max_num_batched_tokens: int = setting(
        512, doc="Tokens of one step. A running stream waits for as long as these take to compute."
    )
    max_prefill_chunk: int = setting(512, doc="Prompt tokens of one sequence in one step.")
    max_num_waiting: int = setting(1024, doc="Requests that may wait in the engine; more are refused.")
    outbox_records: int = setting(
        256, doc="Token records of one reply partition that may be unacked; then its sequences stand still."
    )
    prefix_caching: str = setting(
        "tenant", doc="Who shares cached prefixes: tenant (only its own), shared (all tenants), or off."
    )
    swap_memory_mib: int = setting(
        256, doc="Host memory in MiB for the KV of preempted sequences; 0: they are always recomputed."
    )
    inter_token_target_ms: float = setting(
        45.0, doc="Predicted step in ms that may not be passed while an interactive sequence runs; 0: none."
    )
    batch_watermark: float = setting(
        0.1, doc="Share of the KV blocks that must be free for a request of class batch to be admitted."
    )
    hold_batch_in_prefill: bool = setting(
        True, doc="Batch decodes stand still in steps that carry an interactive prefill."
    )
    canary_s: float = setting(5.0, doc="Seconds between canary requests through the engine; 0: none.")
    stall_s: float = setting(10.0, doc="A step that lasts longer shows as engine_stalled in the heartbeat.")
    stall_exit_s: float = setting(60.0, doc="A step that lasts longer than these seconds ends the worker.")
    start_s: float = setting(60.0, doc="Seconds to reach Kafka in, at the start.")
    drain_s: float = setting(8.0, doc="Seconds that running requests have to end in after SIGTERM.")
    send_s: float = setting(
        300.0,
        doc="Seconds a record may be unacked, while heartbeats are taken, before a worker gives up.",
    )

    def errors(self) -> list[str]:
        found = super().errors()
        if self.slot >= self.worker_slots:
            found.append(f"HEADRACE_SLOT is {self.slot}, but HEADRACE_WORKER_SLOTS is {self.worker_slots}")
        if self.linear not in LINEAR_MODES:
            found.append(f"HEADRACE_LINEAR must be one of {', '.join(LINEAR_MODES)}, got {self.linear!r}")
        if self.runner not in RUNNERS:
            found.append(f"HEADRACE_RUNNER must be {' or '.join(RUNNERS)}, got {self.runner!r}")
        found += self._device_errors()
        for name in ("kv_memory_mib", "outbox_records", "start_s", "drain_s", "send_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                found.append(f"HEADRACE_{name.upper()} must be positive, got {value}")
        if self.swap_memory_mib < 0:
            found.append(f"HEADRACE_SWAP_MEMORY_MIB must not be negative, got {self.swap_memory_mib}")
        if self.prefix_caching not in PREFIX_CACHING:
            found.append(
                f"HEADRACE_PREFIX_CACHING must be {' or '.join(PREFIX_CACHING)}, got {self.prefix_caching!r}"
            )
        if self.canary_s < 0:
            found.append(f"HEADRACE_CANARY_S must not be negative, got {self.canary_s}")
        if not 0 < self.stall_s <= self.stall_exit_s:
            found.append(
                f"HEADRACE_STALL_S ({self.stall_s}) must be positive and at most HEADRACE_STALL_EXIT_S "
                f"({self.stall_exit_s})"
            )
        if self.step_ms < 0:
            found.append(f"HEADRACE_STEP_MS must not be negative, got {self.step_ms}")
        simulation = self._simulation_errors()
        found += simulation
        if self.threads is not None and self.threads < 1:
            found.append(f"HEADRACE_THREADS must be at least 1, got {self.threads}")
        found += self._rank_errors(1 if self.tensor_parallel is None else self.tensor_parallel)
        found += self._role_errors()
        try:
            # Which GPUs these are is not known where their settings are wrong.
            known = replace(self, simulated_gpu="") if simulation else self
            known.scheduler_config(self.max_model_len or 1)
        except ValueError as error:
            found.append(str(error))
        return found

    def scheduler_config(self, model_context: int, *, on_gpu: bool = False) -> SchedulerConfig:
        """The engine's limits for a model with a context of `model_context` tokens."""
        return SchedulerConfig(
            max_model_len=model_context
            if self.max_model_len is None
            else min(self.max_model_len, model_context),
            max_num_seqs=self._max_num_seqs(on_gpu) if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk=self.max_prefill_chunk,
            max_num_waiting=self.max_num_waiting,
            inter_token_target_ms=self.inter_token_target_ms,
            batch_watermark=self.batch_watermark,
            hold_batch_in_prefill=self.hold_batch_in_prefill,
        )

    def _max_num_seqs(self, on_gpu: bool) -> int:
        gpus = self.roofline()
        if gpus is None:
            # What a GPU's KV holds is known later, and a ceiling of its own.
            return (
                min(MOST_UNASKED_SEQS, self.max_num_batched_tokens // 2) if on_gpu else DEFAULT_MAX_NUM_SEQS
            )
        num_blocks = gpus.num_blocks
        if self.kv_memory_mib is not None:
            num_blocks = num_blocks_for(self.kv_memory_mib * MIB, gpus.bytes_per_block)
        return gpu_max_num_seqs(num_blocks, self.max_num_batched_tokens)

    def roofline(self) -> Roofline | None:
        """The GPUs that are simulated, if any. Raises ValueError when the model does not fit them."""
        if not self.simulated_gpu:
            return None
        return Roofline(
            DEVICES[self.simulated_gpu],
            MODELS[self.simulated_model],
            self.simulated_tensor_parallel,
            DType(self.simulated_weight_dtype),
            DType(self.simulated_kv_dtype),
            DType(self.simulated_compute_dtype),
        )

    @property
    def role(self) -> WorkerRole:
        return WorkerRole(self.worker_role)

    @property
    def num_gpus(self) -> int:
        """GPUs that are simulated; 1 without any: the machine."""
        return self.simulated_tensor_parallel if self.simulated_gpu else 1

    def _device_errors(self) -> list[str]:
        """Whether there is a GPU is found when the model is loaded."""
        found = []
        for name, known in (("device", DEVICE_SETTINGS), ("kv_dtype", KV_DTYPES)):
            if (value := getattr(self, name)) not in known:
                found.append(f"HEADRACE_{name.upper()} must be {' or '.join(known)}, got {value!r}")
        if self.device == "cuda" and self.runner == "simulated":
            found.append("HEADRACE_DEVICE is cuda: the simulated runner computes on no device")
        if found or self.device == "auto":
            return found
        problem = device_problem(
            "cuda" if self.device == "cuda" else None,
            deterministic=self.deterministic,
            linear=self.linear,
            kv_dtype=self.kv_dtype,
        )
        return [problem] if problem else []

    def num_ranks(self, spec: ModelSpec) -> int:
        """Of the model; 1 where it is simulated. Raises ConfigError where the settings do not go with it."""
        ranks = 1 if self.runner == "simulated" else choose_ranks(self.tensor_parallel, spec)
        if errors := self._rank_errors(ranks):
            raise ConfigError(error + origin(self.tensor_parallel, spec) for error in errors)
        return ranks

    def _rank_errors(self, ranks: int) -> list[str]:
        return ranks_errors(ranks, runner=self.runner, linear=self.linear, role=self.worker_role)

    def _role_errors(self) -> list[str]:
        """KV is handed over by workers of one rank on the CPU."""
        role = self.worker_role
        if role not in list(WorkerRole):
            return [f"HEADRACE_WORKER_ROLE must be {' or '.join(WorkerRole)}, got {role!r}"]
        found = []
        if self.transfer_protocol not in TRANSFER_PROTOCOLS:
            known = " or ".join(TRANSFER_PROTOCOLS)
            found.append(f"HEADRACE_TRANSFER_PROTOCOL must be {known}, got {self.transfer_protocol!r}")
        if role == WorkerRole.UNIFIED:
            return found
        if self.device == "cuda":
            found.append(f"HEADRACE_WORKER_ROLE is {role}: GPUs hand no KV over yet; set it to unified")
        if not self.transfer_host:
            found.append(f"HEADRACE_WORKER_ROLE is {role}: it needs a HEADRACE_TRANSFER_HOST")
        return found

    def _simulation_errors(self) -> list[str]:
        found = []
        choices: dict[str, list[str]] = {
            "simulated_gpu": ["", *DEVICES],
            "simulated_model": list(MODELS),
            "simulated_weight_dtype": list(DType),
            "simulated_kv_dtype": list(DType),
            "simulated_compute_dtype": list(DType),
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                some = " or ".join(choice or "empty" for choice in known)
                found.append(f"HEADRACE_{name.upper()} must be {some}, got {value!r}")
        # Written so that NaN fails too.
        if not 0 <= self.simulated_speed < float("inf"):
            found.append(f"HEADRACE_SIMULATED_SPEED must be 0 or more, got {self.simulated_speed}")
        if self.simulated_gpu and self.runner != "simulated":
            found.append(f"HEADRACE_SIMULATED_GPU needs HEADRACE_RUNNER=simulated, got {self.runner!r}")
        if self.simulated_gpu and self.step_ms:
            found.append(
                "HEADRACE_STEP_MS and HEADRACE_SIMULATED_GPU both say how long a step takes: set one"
            )
        if not found:
            try:
                self.roofline()
            except ValueError as error:
                found.append(f"HEADRACE_SIMULATED_GPU: {error}")
        return found

    def model_id(self, catalog: Catalog) -> str:
        """The model to serve. Raises CatalogError when it must be named, or is not there."""
        if self.model:
            return catalog.get(self.model).id
        if self.runner == "simulated":
            return SIMULATED_MODEL
        there = catalog.on_disk()
        if len(there) != 1:
            raise CatalogError(f"{catalog.models_dir} holds {len(there)} models: name one in HEADRACE_MODEL")
        return there[0]


def load_config(environ: Mapping[str, str]) -> WorkerConfig:
    """Raises schemas.config.ConfigError with every error found."""
    return from_env(WorkerConfig, environ)
