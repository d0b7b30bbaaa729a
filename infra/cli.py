"""`headrace`: tenants, billing queries, topics. Talks to the stack of `infra/up` unless told otherwise."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.table import Table

from infra.endpoints import Endpoints
from infra.local.paths import DEFAULT_DATA_DIR
from infra.tenants import TenantError, add_key, create_tenant, read_tenants
from infra.topics.create import TopicError, create_topics
from schemas.catalog import Catalog, CatalogError
from schemas.priority import PriorityClass
from schemas.records import ClassLimits
from schemas.topics import Layout

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
tenant_app = typer.Typer(no_args_is_help=True, help="Tenants and their API keys.")
app.add_typer(tenant_app, name="tenant")

T = TypeVar("T")
SQL_TIMEOUT_S = 60.0
Kafka = Annotated[str, typer.Option(envvar="HEADRACE_KAFKA", help="Bootstrap servers; default: infra/up's.")]
DataDir = Annotated[Path, typer.Option(help="Data folder of the local stack.")]


def fail(message: str) -> typer.Exit:
    """Prints one clear line on stderr; raise what it returns."""
    print(f"headrace: {message}", file=sys.stderr)
    return typer.Exit(1)


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except (TenantError, TopicError, ValueError) as e:
        raise fail(str(e)) from None
    except (KafkaError, TimeoutError, OSError) as e:
        raise fail(f"Kafka does not answer ({type(e).__name__}): is the stack up?") from None


def _endpoints(data_dir: Path) -> Endpoints:
    found = Endpoints.load(data_dir)
    if found is None:
        raise fail("no local stack is up: run ./infra/up, or name the servers with the options")
    return found


def _servers(kafka: str, data_dir: Path) -> tuple[str, Layout]:
    """Bootstrap servers and the layout: from the options' environment, or the local stack."""
    if kafka:
        names = ("SHARDS", "WORKER_SLOTS", "GATEWAY_SLOTS")
        try:
            counts = [int(os.environ.get(f"HEADRACE_{name}", 4)) for name in names]
            return kafka, Layout(*counts)
        except ValueError as e:
            raise fail(f"HEADRACE_SHARDS, _WORKER_SLOTS and _GATEWAY_SLOTS must be counts: {e}") from None
    local = _endpoints(data_dir)
    return local.kafka, Layout(local.shards, local.worker_slots, local.gateway_slots)


@tenant_app.command("create")
def tenant_create(
    name: str,
    tier: Annotated[str, typer.Option(help="Highest class it may ask for.")] = "interactive",
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Input and output, per class.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Per class.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at once, per class.")] = None,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Create a tenant with its batch topics, and print its API key, once."""
    try:
        highest = PriorityClass.parse(tier)
    except ValueError as e:
        raise fail(f"--tier: {e}") from None
    servers, layout = _servers(kafka, data_dir)
    values = (tokens_per_minute, requests_per_minute, max_concurrent)
    limits = [ClassLimits(c, *values) for c in PriorityClass] if any(values) else []
    print(_run(create_tenant(servers, layout, name, highest, limits)))


@tenant_app.command("key")
def tenant_key(name: str, kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Print one more API key for a tenant, once."""
    print(_run(add_key(_servers(kafka, data_dir)[0], name)))


@tenant_app.command("list")
def tenant_list(kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show all tenants, their tiers, keys (by their first characters) and limits."""
    table = Table("tenant", "tier", "keys", "limits", "disabled")
    for name, tenant in sorted(_run(read_tenants(_servers(kafka, data_dir)[0])).items()):
        limits = [
            f"{PriorityClass(limit.priority).label}: {limit.tokens_per_minute or '∞'} tokens/min, "
            f"{limit.requests_per_minute or '∞'} requests/min, {limit.max_concurrent_requests or '∞'} at once"
            for limit in tenant.limits
        ]
        keys = ", ".join(key.key_id + "…" for key in tenant.keys)
        disabled = "yes" if tenant.disabled else ""
        table.add_row(name, PriorityClass(tenant.tier).label, keys, "\n".join(limits) or "none", disabled)
    Console().print(table)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="A query, or - to read it from standard input.")],
    output_format: Annotated[
        str, typer.Option("--format", help="A ClickHouse output format.")
    ] = "PrettyCompactMonoBlock",
    url: Annotated[str, typer.Option(help="The SQL endpoint; default: infra/up's.")] = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Run a read-only query on the billing database."""
    text = sys.stdin.read() if query == "-" else query
    target = url or _endpoints(data_dir).sql
    try:
        answer = httpx.post(
            target, content=text.encode(), params={"default_format": output_format}, timeout=SQL_TIMEOUT_S
        )
    except httpx.HTTPError as e:
        raise fail(f"no answer from {target} ({type(e).__name__}): is the ledger up?") from None
    if answer.status_code != 200:
        raise fail(answer.text.strip())
    sys.stdout.write(answer.text)


@app.command()
def topics(
    kafka: Kafka = "",
    shards: Annotated[int, typer.Option(min=1)] = 64,
    worker_slots: Annotated[int, typer.Option(min=1)] = 64,
    gateway_slots: Annotated[int, typer.Option(min=1)] = 16,
    replication: Annotated[int, typer.Option(min=1)] = 3,
    min_isr: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Create the topics of a deployment that are missing. Shards are fixed when topics are created."""
    if not kafka:
        raise fail("name the servers: --kafka host:port or HEADRACE_KAFKA")
    created = _run(_create(kafka, shards, worker_slots, gateway_slots, replication, min_isr))
    print("\n".join(created) or "all topics exist")


async def _create(kafka: str, *counts: int) -> list[str]:
    return await create_topics(kafka, Layout(*counts))


@app.command()
def models(
    models_dir: Annotated[Path, typer.Option(envvar="HEADRACE_MODELS_DIR", help="The catalogue's folder.")],
) -> None:
    """Show the model catalogue: every folder with a model.json."""
    try:
        catalog = Catalog.load(models_dir)
    except CatalogError as e:
        raise fail(str(e)) from None
    table = Table("model", "architecture", "context", "license")
    for spec in catalog.specs.values():
        table.add_row(
            spec.id, spec.architecture, str(spec.max_model_len), f"{spec.license} {spec.license_url}"
        )
    Console().print(table)


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(help="A scenario: see infra/simulator/scenarios.")],
    picture: Annotated[Path | None, typer.Option(help="Also draw the figures over time: a PNG file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Other random numbers than the scenario's.")] = None,
    step: Annotated[bool, typer.Option("--step", help="Take each decode step by itself: slower.")] = False,
) -> None:
    """Run a fleet in virtual time: the shipped decisions on simulated GPUs. Figures are JSON, last line."""
    # numpy and the engine's decisions are not needed by the other commands.
    from infra.simulator.command import simulate as run_scenario

    try:
        print(run_scenario(scenario, leap=not step, seed=seed, picture=picture, report=_say))
    except (ValueError, OSError) as e:
        raise fail(str(e)) from None


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
