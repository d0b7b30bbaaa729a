"""`headrace`: tenants, billing queries, topics. Talks to the stack of `infra/up` unless told otherwise."""

import sys
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from infra import tenant_cli
from infra.command_line import DataDir, Kafka, endpoints, fail, run, servers
from infra.local.paths import DEFAULT_DATA_DIR
from infra.topics.create import create_topics
from schemas.catalog import Catalog, CatalogError
from schemas.topics import Layout

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.add_typer(tenant_cli.app, name="tenant")

SQL_TIMEOUT_S = 60.0


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
    target = url or endpoints(data_dir).sql
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
    created = run(_create(kafka, shards, worker_slots, gateway_slots, replication, min_isr))
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


@app.command()
def replay(
    since: Annotated[str, typer.Option("--from", help="ISO 8601, or 30s, 10m, 2h ago.")],
    until: Annotated[str | None, typer.Option("--to", help="The same; default: now.")] = None,
    policy: Annotated[Path | None, typer.Option(help="A Python file with make_policy().")] = None,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Run another policy over recorded traffic and print the differences; JSON is the last line."""
    from infra.replay.command import replay as run_policy
    from infra.replay.command import show

    server, layout = servers(kafka, data_dir)
    show(run(run_policy(server, layout, since, until, policy)), Console(stderr=True))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
