"""A scenario: a fleet, who asks it for what, and what goes wrong. Times in seconds unless named otherwise.

Errors name the field, as `$.fleet[0].gpu`. The settings of an engine and of admission have the names and the
defaults that the services have.
"""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from infra.simulator.measured import MeasuredCosts
from schemas.config import PREFIX, from_env
from schemas.handoff_records import WorkerRole
from schemas.records import KVLayout
from streams.admission.config import AdmissionConfig
from workers.block_pool import BLOCK_SIZE
from workers.config import WorkerConfig
from workers.roofline import DEVICES, MODELS, DType, Roofline, StepCosts
from workers.scheduler_config import SchedulerConfig, gpu_max_num_seqs

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Lognormal(Struct, forbid_unknown_fields=True, frozen=True):
    median: Positive
    sigma: Annotated[float, Meta(ge=0)]


class Lengths(Struct, forbid_unknown_fields=True, frozen=True):
    """One of the kinds. `histogram`: (longest of the bin, weight), ascending; uniform within a bin."""

    fixed: Count | None = None
    lognormal: Lognormal | None = None
    histogram: Annotated[list[tuple[Count, Annotated[float, Meta(ge=0)]]], Meta(min_length=1)] | None = None
    least: Count = 1
    most: Count = 1 << 20


class Model(Struct, forbid_unknown_fields=True, frozen=True):
    """`shape` is one of the roofline's; workers that are `measured` need none."""

    shape: str | None = None
    weight_dtype: DType = DType.FP8
    kv_dtype: DType = DType.BF16
    compute_dtype: DType = DType.BF16
    max_model_len: Count = 32_768


class Measured(Struct, forbid_unknown_fields=True, frozen=True):
    """Instead of GPUs, what a worker told of itself: its KV blocks, how long a step takes (and for each
    sequence in it) in ms, and how fast it computes prompts (0: not known)."""

    num_blocks: Count
    step_ms: Annotated[float, Meta(ge=0)]
    seq_ms: Annotated[float, Meta(ge=0)] = 0.0
    prefill_tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0


class Workers(Struct, forbid_unknown_fields=True, frozen=True):
    """`count` workers, each on `tensor_parallel` GPUs of which it has `memory_share`, or as `measured`. Slots
    are in order. `transfer_gb_s`: at which one sends and receives KV, in GB/s; 50 is a 400 Gbit/s network
    interface."""

    model: str
    gpu: str | None = None
    measured: Measured | None = None
    count: Count = 1
    tensor_parallel: Count = 1
    memory_share: Share = 0.9
    max_num_seqs: Count | None = WorkerConfig.max_num_seqs
    max_num_batched_tokens: Count = WorkerConfig.max_num_batched_tokens
    max_prefill_chunk: Count = WorkerConfig.max_prefill_chunk
    inter_token_target_ms: Seconds = WorkerConfig.inter_token_target_ms
    batch_watermark: float = WorkerConfig.batch_watermark
    hold_batch_in_prefill: bool = WorkerConfig.hold_batch_in_prefill
    prefix_caching: str = WorkerConfig.prefix_caching
    swap_memory_mib: Annotated[int, Meta(ge=0)] = WorkerConfig.swap_memory_mib
    role: WorkerRole = WorkerRole.UNIFIED
    transfer_gb_s: Positive = 50.0


class TenantPlan(Struct, forbid_unknown_fields=True, frozen=True):
    """`limits` are those of schemas.records.ClassLimits, in force in each class."""

    weight: Positive = 1.0
    tier: str = "interactive"
    limits: dict[str, Count] = {}


class Spike(Struct, forbid_unknown_fields=True, frozen=True):
    """Between `at` and `until` arrivals are `times` as many."""

    at: Seconds
    until: Positive
    times: Annotated[float, Meta(ge=0)]


class Waves(Struct, forbid_unknown_fields=True, frozen=True):
    """A sine from `low` (share of the rate) up to the whole rate and back every `period`."""

    period: Positive
    low: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Bursts(Struct, forbid_unknown_fields=True, frozen=True):
    """`size` requests at one time, every `every`, from the first `every` on."""

    every: Positive
    size: Count


class Prefixes(Struct, forbid_unknown_fields=True, frozen=True):
    """`count` system prompts of `tokens` each; the k-th most popular is drawn in proportion to k ** -zipf."""

    tokens: Count
    count: Count = 1
    zipf: Annotated[float, Meta(ge=0)] = 0.0


class Traffic(Struct, forbid_unknown_fields=True, frozen=True):
    """Requests of one kind. `rate` a second (Poisson), or those of `trace`, a file beside the scenario with
    lines of JSON: {"at": …, "prompt": …, "output": …}.

    `output` is when the model ends by itself; `max_tokens` None: it is what the request asks for, exactly.
    Served well is what meets `target_ttft_ms` and, over its output, `target_itl_ms`; None: whatever ends.
    `prefixes` are the head of the prompt, whose length is `prompt` and at least one token more than that.
    """

    model: str
    tenants: Annotated[dict[str, Positive], Meta(min_length=1)]
    rate: Annotated[float, Meta(ge=0)] = 0.0
    trace: str | None = None
    prompt: Lengths | None = None
    output: Lengths | None = None
    max_tokens: Count | None = None
    priority: str = "interactive"
    start_ms: Count | None = None
    end_ms: Count = 600_000
    target_ttft_ms: Positive | None = None
    target_itl_ms: Positive | None = None
    from_s: Seconds = 0.0
    spikes: list[Spike] = []
    waves: Waves | None = None
    bursts: Bursts | None = None
    prefixes: Prefixes | None = None


class BatchBacklog(Struct, forbid_unknown_fields=True, frozen=True):
    """A batch of `requests`, there from `at` on; its coordinator keeps at most `window` of them open."""

    model: str
    tenant: str
    requests: Count
    prompt: Lengths
    output: Lengths
    window: Count = 256
    at: Seconds = 0.0


class Failure(Struct, forbid_unknown_fields=True, frozen=True):
    """`silent`: the host vanishes; else the process dies and its parent says so at once."""

    at: Seconds
    slot: Annotated[int, Meta(ge=0)]
    back_at: Seconds | None = None
    silent: bool = False


class Delays(Struct, forbid_unknown_fields=True, frozen=True):
    """Of a record from its writer to its reader, and how long a heartbeat waits to be read in a batch."""

    hop_ms: Positive = 3.0
    heartbeat_read_ms: Positive = 50.0


class Scenario(Struct, forbid_unknown_fields=True, frozen=True):
    """Requests arrive for `duration`; those of the first `warm_up` are served but not measured.

    `policy` are settings of admission (streams/admission/config.py), as `output_quantile: 0.9`.
    """

    duration: Positive
    models: Annotated[dict[str, Model], Meta(min_length=1)]
    fleet: Annotated[list[Workers], Meta(min_length=1)]
    tenants: Annotated[dict[str, TenantPlan], Meta(min_length=1)]
    traffic: dict[str, Traffic] = {}
    backlogs: dict[str, BatchBacklog] = {}
    failures: list[Failure] = []
    delays: Delays = Delays()
    policy: dict[str, bool | int | float | str] = {}
    seed: int = 0
    warm_up: Seconds = 0.0
    description: str = ""

    @property
    def num_gpus(self) -> int:
        return sum(workers.count * workers.tensor_parallel for workers in self.fleet)


def admission_config(policy: Mapping[str, bool | int | float | str]) -> AdmissionConfig:
    """Raises ConfigError for settings that admission has not, or that are wrong."""
    environ = {f"{PREFIX}{name.upper()}": str(value) for name, value in policy.items()}
    return from_env(AdmissionConfig, environ | {f"{PREFIX}KAFKA": "none"})


def kv_layout(model: Model, workers: Workers) -> KVLayout | None:
    """What its heartbeats tell; None where it takes part in no handoff."""
    if workers.role is WorkerRole.UNIFIED or model.shape is None:
        return None
    shape = MODELS[model.shape]
    dtype = "bfloat16" if model.kv_dtype is DType.BF16 else "float8_e4m3fn"
    heads = shape.num_kv_heads, shape.head_dim
    return KVLayout(BLOCK_SIZE, dtype, workers.tensor_parallel, shape.num_layers, *heads)


def step_costs(model: Model, workers: Workers) -> StepCosts:
    """Raises ValueError when the model does not fit."""
    measured = workers.measured
    if measured is not None:
        times = measured.step_ms / 1000, measured.seq_ms / 1000, measured.prefill_tokens_per_s
        return MeasuredCosts(measured.num_blocks, *times)
    assert workers.gpu is not None  # scenario_file.py looked at both
    assert model.shape is not None
    return Roofline(
        DEVICES[workers.gpu],
        MODELS[model.shape],
        workers.tensor_parallel,
        model.weight_dtype,
        model.kv_dtype,
        model.compute_dtype,
        memory_share=workers.memory_share,
    )


def scheduler_config(model: Model, workers: Workers) -> SchedulerConfig:
    """Raises ValueError for limits that no engine takes, and where the model does not fit."""
    max_num_seqs = workers.max_num_seqs
    if max_num_seqs is None:
        num_blocks = step_costs(model, workers).num_blocks
        max_num_seqs = gpu_max_num_seqs(num_blocks, workers.max_num_batched_tokens)
    return SchedulerConfig(
        max_model_len=model.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=workers.max_num_batched_tokens,
        max_prefill_chunk=workers.max_prefill_chunk,
        inter_token_target_ms=workers.inter_token_target_ms,
        batch_watermark=workers.batch_watermark,
        hold_batch_in_prefill=workers.hold_batch_in_prefill,
    )
