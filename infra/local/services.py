"""The services of a local stack: how each is run, and what it is told. Spelled here alone."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.local.broker import password_file
from infra.local.broker_properties import SUPER_USER
from infra.local.gpu import VISIBLE, gpus_of_worker
from infra.local.health import LIVE_PATH, READY_PATH
from infra.local.stream_secret import stream_secret
from schemas.config import PREFIX
from schemas.handoff_records import WorkerRole
from schemas.topics import Layout

_ADMIN_KEY = "HEADRACE_ADMIN_KEY"
_GATEWAY_DRAIN_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What a local stack is made of.

    `models` are catalogue ids: the gateway offers all of them (empty: all in `models_dir`), the workers
    serve the first, each on `tensor_parallel` ranks (None, which is for CPUs: as its entry says), on `device`
    (HEADRACE_DEVICE); of `gpus`, as CUDA calls them, each worker has its own. `roles` are those of the first
    workers, by slot; the others are unified. `step_ms` is a step of the simulated runner. Ports: 0 has a free
    one chosen, and `gateway_port` is that of slot 0. `settings` adds environment variables to one service, or
    to one of its processes: {"worker": {"HEADRACE_KV_MEMORY_MIB": "64"}, "worker-1": {"HEADRACE_MODEL":
    "other"}}.
    `start_timeout` (s) is for each process. Of several `ledgers` one has the tables and the SQL port, and the
    others stand by: they count as ready once they run. `kafka_proxies`: ports that the broker listens on
    beside its own, and for each the port of a proxy to it; a process is sent there by its HEADRACE_KAFKA.
    With `broker_auth` Kafka's clients must log in, the services too. Of several `brokers`, broker-2 and so on
    are no controllers; `layout` says how often records are kept.
    """

    data_dir: Path
    models_dir: Path
    models: tuple[str, ...] = ()
    runner: str = "torch"
    deterministic: bool = False
    step_ms: float | None = None
    layout: Layout = field(default_factory=Layout)
    workers: int = 1
    tensor_parallel: int | None = None
    device: str = "auto"
    gpus: tuple[str, ...] = ()
    roles: tuple[WorkerRole, ...] = ()
    gateways: int = 1
    admissions: int = 1
    ledgers: int = 1
    kafka_port: int = 0
    gateway_port: int = 0
    sql_port: int = 0
    start_timeout: float = 300.0
    kafka_proxies: Mapping[int, int] = field(default_factory=dict)
    broker_auth: bool = False
    brokers: int = 1
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {
            "workers": (self.workers, self.layout.worker_slots),
            "gateways": (self.gateways, self.layout.gateway_slots),
            "admissions": (self.admissions, self.layout.shards),
            "ledgers": (self.ledgers, self.layout.shards),
        }
        errors = [
            f"{name} must be 0 to {most} with this layout, not {count}"
            for name, (count, most) in counts.items()
            if not 0 <= count <= most
        ]
        errors += [
            f"{name} must be 0 to 65535, not {getattr(self, name)}"
            for name in ("kafka_port", "gateway_port", "sql_port")
            if not 0 <= getattr(self, name) <= 65_535
        ]
        if len(self.roles) > self.workers:
            errors.append(f"{len(self.roles)} roles for {self.workers} workers")
        if self.gpus and self.tensor_parallel is None:
            errors.append("gpus are shared out by tensor_parallel: say how many a worker has")
        if self.broker_auth and self.brokers > 1:
            errors.append("broker_auth is for one broker")
        if errors:
            raise ValueError("stack: " + "; ".join(errors))

    def role_of(self, slot: int) -> WorkerRole:
        """Of the worker in that slot, in all its lives."""
        return self.roles[slot] if slot < len(self.roles) else WorkerRole.UNIFIED

    @property
    def hands_over(self) -> bool:
        """Whether some worker gives its KV to another or gets it."""
        return any(role is not WorkerRole.UNIFIED for role in self.roles)


def split_roles(workers: int) -> tuple[WorkerRole, ...]:
    """Half of them compute prompts, the larger half decodes. Raises ValueError for fewer than two."""
    if workers < 2:
        raise ValueError(f"{workers} worker cannot be both: one computes prompts, another one decodes")
    num_prefill = workers // 2
    return (WorkerRole.PREFILL,) * num_prefill + (WorkerRole.DECODE,) * (workers - num_prefill)


@dataclass(frozen=True, slots=True)
class Instance:
    """One process of a service: its slot and the ports it was given (`sql_port` for the ledger only)."""

    service: str
    slot: int
    http_port: int
    sql_port: int = 0

    @property
    def name(self) -> str:
        return f"{self.service}-{self.slot}"


@dataclass(frozen=True, slots=True)
class Service:
    """`settings` says what this service is told beside what all are told. `count` is its processes.

    All services start together; they stop wave by wave, the highest `wave` first.
    """

    argv: tuple[str, ...]
    wave: int
    count: Callable[[StackConfig], int]
    settings: Callable[[StackConfig, Instance], Mapping[str, str]] = lambda config, instance: {}
    stop_timeout: float = 15.0
    ready_path: Callable[[StackConfig], str] = lambda config: READY_PATH


def environment(
    service: Service,
    config: StackConfig,
    instance: Instance,
    bootstrap_servers: str,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of a service's process.

    Services refuse HEADRACE_ names they do not know, so of these they get what is theirs and no more.
    """
    outside = {key: value for key, value in inherited.items() if not key.startswith(PREFIX)}
    admin_key = inherited.get(_ADMIN_KEY)
    if instance.service == "gateway" and admin_key:
        outside[_ADMIN_KEY] = admin_key
    return {
        **outside,
        "PYTHONUNBUFFERED": "1",
        "HEADRACE_KAFKA": bootstrap_servers,
        "HEADRACE_SLOT": str(instance.slot),
        "HEADRACE_HTTP_PORT": str(instance.http_port),
        "HEADRACE_SHARDS": str(config.layout.shards),
        "HEADRACE_WORKER_SLOTS": str(config.layout.worker_slots),
        "HEADRACE_GATEWAY_SLOTS": str(config.layout.gateway_slots),
        "HEADRACE_MODELS_DIR": str(config.models_dir),
        "HEADRACE_MODELS": ",".join(config.models),
        **_kafka_login(config),
        **service.settings(config, instance),
        **config.settings.get(instance.service, {}),
        **config.settings.get(instance.name, {}),
    }


def _kafka_login(config: StackConfig) -> dict[str, str]:
    if not config.broker_auth:
        return {}
    return {
        "HEADRACE_KAFKA_USER": SUPER_USER,
        "HEADRACE_KAFKA_PASSWORD_FILE": str(password_file(config.data_dir)),
    }


def _ledger_settings(config: StackConfig, instance: Instance) -> dict[str, str]:
    return {
        "HEADRACE_DATA_DIR": str(config.data_dir / "ledger"),
        "HEADRACE_OBJECT_STORE": str(config.data_dir / "objects"),
        "HEADRACE_SQL_PORT": str(instance.sql_port),
    }


def _worker_settings(config: StackConfig, instance: Instance) -> dict[str, str]:
    settings = {
        "HEADRACE_RUNNER": config.runner,
        "HEADRACE_DETERMINISTIC": "true" if config.deterministic else "false",
        "HEADRACE_WORKER_ROLE": config.role_of(instance.slot),
    }
    if config.models:
        settings["HEADRACE_MODEL"] = config.models[0]
    if config.tensor_parallel is not None:
        settings["HEADRACE_TENSOR_PARALLEL"] = str(config.tensor_parallel)
    if config.runner == "torch":
        settings["HEADRACE_DEVICE"] = config.device
        if own := gpus_of_worker(config.gpus, instance.slot, config.tensor_parallel or 1):
            settings[VISIBLE] = ",".join(own)
    if config.step_ms is not None:
        settings["HEADRACE_STEP_MS"] = f"{config.step_ms:g}"
    return settings


def _gateway_settings(config: StackConfig, instance: Instance) -> dict[str, str]:
    # Ctrl-C is no rollout: whoever stops a local stack does not wait half a minute for an open stream.
    return {
        "HEADRACE_DRAIN_S": str(_GATEWAY_DRAIN_S),
        "HEADRACE_OBJECT_STORE": str(config.data_dir / "objects"),
        "HEADRACE_STREAM_SECRET": stream_secret(config.data_dir),
    }


SERVICES: Mapping[str, Service] = {
    "admission": Service((sys.executable, "-m", "streams", "admission"), 0, lambda c: c.admissions),
    "ledger": Service(
        (sys.executable, "-m", "streams", "ledger"),
        0,
        lambda c: c.ledgers,
        _ledger_settings,
        ready_path=lambda c: READY_PATH if c.ledgers == 1 else LIVE_PATH,
    ),
    # A worker drains for 8 s, then tells of its end; what is not out by then is billed by nobody.
    "worker": Service((sys.executable, "-m", "workers"), 1, lambda c: c.workers, _worker_settings, 30.0),
    "gateway": Service((sys.executable, "-m", "gateway"), 2, lambda c: c.gateways, _gateway_settings),
}
