"""`./infra/up`: starts the whole stack on this machine, shows its main job, stays up until Ctrl-C."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console

from infra import live_figures, main_job
from infra.endpoints import Endpoints
from infra.local.broker import BrokerError
from infra.local.child import ChildError
from infra.local.gpu import GpuError, gpu_names, gpu_problem, serving_on, visible_gpus
from infra.local.java import JavaError
from infra.local.kafka_jars import KafkaJarsError
from infra.local.model import MODEL_ID, ModelError, ensure_model
from infra.local.paths import DEFAULT_DATA_DIR, DEFAULT_MODELS_DIR
from infra.local.ports import PortTakenError
from infra.local.services import StackConfig, split_roles
from infra.local.stack import Stack, StackError
from infra.local.verbs import VerbsError
from infra.main_job import JobError, Target
from infra.tenants import TenantError, add_key, create_tenant, read_tenants
from infra.topics.create import TopicError
from infra.up_guide import print_guide
from schemas.catalog import SIMULATED_MODEL, Catalog, CatalogError
from schemas.priority import PriorityClass
from workers.device import DEVICES
from workers.rank_settings import choose_ranks, origin

DEMO_TENANT = "demo"
_KEY_FILE = "demo.key"
# What a run leaves in its data folder. --fresh removes these and nothing else.
_DATA_ENTRIES = ("kafka", "ledger", "logs", "endpoints.json", _KEY_FILE)
_EXPECTED = (
    BrokerError,
    CatalogError,
    ChildError,
    GpuError,
    JavaError,
    JobError,
    KafkaJarsError,
    ModelError,
    PortTakenError,
    StackError,
    TenantError,
    TopicError,
    VerbsError,
    OSError,
    TimeoutError,
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    once: bool
    fresh: bool
    simulated: bool
    model: str
    deterministic: bool
    step_ms: float
    workers: int
    disaggregated: bool
    tensor_parallel: int | None
    device: str
    port: int
    sql_port: int
    kafka_port: int
    broker_auth: bool
    data_dir: Path
    models_dir: Path


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


def main(
    once: Annotated[
        bool, typer.Option("--once", help="Stop after the main job; status 0 if all of it worked.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew: forget all data of earlier runs.")
    ] = False,
    runner: Annotated[str, typer.Option(help="torch: a real model; simulated: needs none.")] = "torch",
    model: Annotated[
        str, typer.Option(help="Catalogue id; another than the embedded must be there.")
    ] = MODEL_ID,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Equal output whatever the batch.")
    ] = False,
    step_ms: Annotated[float, typer.Option(min=0, help="Step time of the simulated runner, ms.")] = 5.75,
    workers: Annotated[int, typer.Option(min=1, max=4)] = 1,
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            help="Half of the workers, of two at least, compute prompts, the others decode.",
        ),
    ] = False,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks that each worker spreads the model over, each a process; else as its entry says.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, cpu, or auto: CUDA where a GPU is, else the CPU.")
    ] = "auto",
    port: Annotated[int, typer.Option(help="Of the HTTP API; 0 takes a free one.")] = 8000,
    sql_port: Annotated[int, typer.Option(help="Of the billing database; 0 takes a free one.")] = 8123,
    kafka_port: Annotated[int, typer.Option(help="Of the broker; 0 takes a free one.")] = 9092,
    broker_auth: Annotated[
        bool,
        typer.Option("--broker-auth", help="Kafka's clients must log in; a tenant may use its topics only."),
    ] = False,
    data_dir: Annotated[Path, typer.Option(help="Where data and logs lie.")] = DEFAULT_DATA_DIR,
    models_dir: Annotated[Path, typer.Option(help="Where the model catalogue lies.")] = DEFAULT_MODELS_DIR,
) -> None:
    """Start Kafka, admission, ledger, a worker and a gateway; show a stream, batch records and the bill."""
    if runner not in ("torch", "simulated"):
        raise typer.BadParameter("use torch or simulated", param_hint="--runner")
    if device not in DEVICES:
        raise typer.BadParameter(f"use {', '.join(DEVICES)}", param_hint="--device")
    simulated = runner == "simulated"
    if disaggregated:
        if (tensor_parallel or 1) > 1 or device == "cuda":
            raise typer.BadParameter(
                "workers of one rank on the CPU hand KV over, and no others yet", param_hint="--disaggregated"
            )
        workers, device, tensor_parallel = max(2, workers), "cpu", 1
    options = Options(
        once,
        fresh,
        simulated,
        SIMULATED_MODEL if simulated else model,
        deterministic,
        step_ms,
        workers,
        disaggregated,
        tensor_parallel,
        device,
        port,
        sql_port,
        kafka_port,
        broker_auth,
        data_dir.resolve(),
        models_dir.resolve(),
    )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        uvloop.run(_up(options, console))
    except Interrupted:
        console.print("stopped")
        # As a shell expects of a job that Ctrl-C ended; staying up is over when the user says so.
        raise typer.Exit(130 if once else 0) from None
    except _EXPECTED as e:
        print(f"\nheadrace: {e or type(e).__name__}", file=sys.stderr)
        print(f"headrace: stopped; the logs lie in {options.data_dir / 'logs'}", file=sys.stderr)
        raise typer.Exit(1) from None


async def _up(options: Options, console: Console) -> None:
    interrupted = asyncio.get_running_loop().create_future()

    def interrupt() -> None:
        if not interrupted.done():
            console.print("\nstopping …")
            interrupted.set_exception(Interrupted())

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    started = time.monotonic()

    def report(message: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:6.1f} s[/]  {message}")

    if options.model == MODEL_ID:
        await _unless(interrupted, asyncio.to_thread(ensure_model, options.models_dir, report))
    spec = Catalog.load(options.models_dir).get(options.model)
    ranks = 1 if options.simulated else choose_ranks(options.tensor_parallel, spec)
    names = [] if options.simulated else gpu_names()
    gpus = visible_gpus(len(names), os.environ)
    if not options.simulated:
        if problem := gpu_problem(
            gpus,
            "cpu" if options.deterministic and options.device == "auto" else options.device,
            workers=options.workers,
            tensor_parallel=ranks,
        ):
            raise GpuError(problem + origin(options.tensor_parallel, spec))
        report(serving_on(names if gpus else [], options.device, deterministic=options.deterministic))
    stack = Stack(
        StackConfig(
            data_dir=options.data_dir,
            models_dir=options.models_dir,
            models=(options.model,),
            runner="simulated" if options.simulated else "torch",
            deterministic=options.deterministic,
            step_ms=options.step_ms if options.simulated else None,
            workers=options.workers,
            tensor_parallel=ranks,
            device=options.device,
            gpus=tuple(gpus),
            roles=split_roles(options.workers) if options.disaggregated else (),
            kafka_port=options.kafka_port,
            broker_auth=options.broker_auth,
            gateway_port=options.port,
            sql_port=options.sql_port,
        ),
        report=report,
        prepare=_forget_data if options.fresh else lambda data_dir: None,
    )
    try:
        await _unless(interrupted, stack.start())
        report("all is ready")
        await _unless(interrupted, _while_alive(stack, _show_and_stay(stack, options, console)))
    finally:
        Endpoints.forget(options.data_dir)
        await stack.stop()


async def _unless(interrupted: asyncio.Future[None], work: Awaitable[T]) -> T:
    """`work`'s result; raises Interrupted when that comes first, after `work` has been cancelled."""
    task = asyncio.ensure_future(work)
    either: list[asyncio.Future[Any]] = [task, interrupted]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    if interrupted.done():
        interrupted.result()
    return task.result()


async def _while_alive(stack: Stack, work: Awaitable[None]) -> None:
    """Runs `work`; raises ChildDiedError as soon as a process of the stack dies."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(stack.watch())
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            watch.result()
        await task
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _show_and_stay(stack: Stack, options: Options, console: Console) -> None:
    layout = stack.config.layout
    endpoints = Endpoints(
        stack.bootstrap_servers,
        stack.url(),
        stack.sql_url,
        layout.shards,
        layout.worker_slots,
        layout.gateway_slots,
        stack.config.broker_auth,
    )
    endpoints.save(options.data_dir)
    key = await _demo_key(stack, options.data_dir / _KEY_FILE)
    await main_job.show(
        Target(endpoints.gateway, stack.bootstrap_servers, endpoints.sql, DEMO_TENANT, key, options.model),
        console,
    )
    if options.once:
        return
    print_guide(console, endpoints, DEMO_TENANT, key, options.model, stack.config)
    await live_figures.follow(stack, console)


async def _demo_key(stack: Stack, key_file: Path) -> str:
    """The demo tenant's key, from the last run where it can be."""
    kafka = stack.bootstrap_servers
    exists = DEMO_TENANT in await read_tenants(kafka)
    if exists and (kept := _read_key(key_file)):
        return kept
    key = (
        await add_key(kafka, DEMO_TENANT)
        if exists
        else await create_tenant(kafka, stack.config.layout, DEMO_TENANT, PriorityClass.INTERACTIVE, [])
    )
    _write_key(key_file, key)
    return key


def _read_key(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None


def _write_key(path: Path, key: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(key)


def _forget_data(data_dir: Path) -> None:
    """Removes what runs leave in `data_dir`; the caller holds the folder's lock."""
    for name in _DATA_ENTRIES:
        entry = data_dir / name
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


if __name__ == "__main__":
    typer.run(main)
