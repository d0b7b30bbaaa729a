"""`headrace`: tenants, models, billing, topics. Talks to the stack of `infra/up` unless told otherwise."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from infra import kernel_cli, ledger_cli, model_cli, price_cli, spend_cli, tenant_cli
from infra.command_line import DataDir, Kafka, SqlUrl, ask_sql, endpoints, fail, run, servers, with_login
from infra.invoice import invoice_query, make_invoice, parse_month
from infra.invoice_table import show_invoice
from infra.local.paths import DEFAULT_DATA_DIR
from infra.topics.create import create_topics
from schemas.catalog import Catalog, CatalogError
from schemas.topics import Layout, check_tenant

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
tenant_cli.app.command()(spend_cli.spend)
app.add_typer(tenant_cli.app, name="tenant")
app.add_typer(model_cli.app, name="model")
app.add_typer(kernel_cli.app, name="kernels")
app.add_typer(price_cli.app, name="price")
app.add_typer(ledger_cli.app, name="ledger")


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="A query, or - to read it from standard input.")],
    output_format: Annotated[
        str, typer.Option("--format", help="A ClickHouse output format.")
    ] = "PrettyCompactMonoBlock",
    url: SqlUrl = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Run a read-only query on the billing database."""
    text = sys.stdin.read() if query == "-" else query
    sys.stdout.write(ask_sql(url or endpoints(data_dir).sql, text, output_format))


@app.command()
def invoice(
    tenant: str,
    month: Annotated[str, typer.Option(help="As 2026-11.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    url: SqlUrl = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Print a tenant's bill of a month: tokens at each price, and what they come to."""
    try:
        text = invoice_query(check_tenant(tenant), parse_month(month))
    except ValueError as e:
        raise fail(str(e)) from None
    rows = ask_sql(url or endpoints(data_dir).sql, text, "JSONEachRow").splitlines()
    found = make_invoice(tenant, parse_month(month), map(json.loads, rows))
    if as_json:
        print(json.dumps(found.view(), indent=2))
    else:
        show_invoice(found, Console())


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
    created = run(_create(with_login(kafka), shards, worker_slots, gateway_slots, replication, min_isr))
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
    closed_loop: Annotated[
        bool,
        typer.Option(
            "--closed-loop",
            help="Let each policy meet the load that its own decisions make, on a simulated fleet.",
        ),
    ] = False,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Run another policy over recorded traffic and print the differences; JSON is the last line."""
    from infra.replay.command import replay as run_policy
    from infra.replay.command import show

    server, layout = servers(kafka, data_dir)
    figures = run(run_policy(server, layout, since, until, policy, closed_loop=closed_loop))
    show(figures, Console(stderr=True))


@app.command()
def audit(
    since: Annotated[
        str, typer.Option("--since", "--last", help="Requests accepted from then on: ISO 8601, or 10m, 2h.")
    ] = "110m",
    sql: Annotated[str, typer.Option(help="The SQL endpoint; default: infra/up's.")] = "",
    objects: Annotated[
        str | None,
        typer.Option(envvar="HEADRACE_OBJECT_STORE", help="The object store of files; default: infra/up's."),
    ] = None,
    client_records: Annotated[
        Path | None, typer.Option(help="What clients received, JSON lines: see infra/audit/clients.py.")
    ] = None,
    settle: Annotated[
        float, typer.Option(min=0, help="Seconds that an end may take to be billed and to free all it held.")
    ] = 5.0,
    passes: Annotated[
        int, typer.Option(min=1, help="Read the log so often, for as much less memory (3 KB a request).")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="All findings as one line of JSON.")] = False,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Account for every stream, token and row: the log against the bill. Exit 1 when anything is found."""
    from infra.audit.command import run_audit, show, to_json
    from infra.audit.reading import AuditError

    server, layout = servers(kafka, data_dir)
    if not kafka:
        objects = objects or str(data_dir / "objects")
    target = sql or endpoints(data_dir).sql
    try:
        report = run(
            run_audit(
                server,
                layout,
                sql=target,
                since=since,
                objects=objects,
                clients=client_records,
                settle_s=settle,
                passes=passes,
            )
        )
    except AuditError as e:
        raise fail(str(e)) from None
    show(report, Console(stderr=as_json))
    if as_json:
        print(to_json(report))
    if not report.clean:
        raise typer.Exit(1)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
