"""`headrace model`: which models clients may ask for, while services run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from gateway.control_store import ModelStore
from infra.command_line import DataDir, Kafka, fail, run, servers
from infra.local.paths import DEFAULT_DATA_DIR, DEFAULT_MODELS_DIR
from infra.model_plan import HEADINGS, Asked, plans
from infra.tenants import opened
from schemas.catalog import Catalog, CatalogError
from schemas.records import Model
from workers.memory_plan import Format

app = typer.Typer(no_args_is_help=True, help="Models that clients may ask for, while services run.")

ModelsDir = Annotated[Path, typer.Option(envvar="HEADRACE_MODELS_DIR", help="The catalogue's folder.")]


@app.command()
def add(
    name: str,
    fallback: Annotated[
        list[str] | None, typer.Option(help="Serves under overload, in the place of those in model.json.")
    ] = None,
    models_dir: ModelsDir = DEFAULT_MODELS_DIR,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Offer a model of the catalogue, in force within two seconds. Its workers are started elsewhere."""
    model = Model(name, fallback or [])
    try:
        catalog = Catalog.load(models_dir)
        catalog.get(name)
        catalog.check_fallbacks(name, model.fallback_models)
    except CatalogError as e:
        raise fail(str(e)) from None
    run(_edit(servers(kafka, data_dir)[0], name, lambda known: model))
    print(f"model {name} is offered")


@app.command()
def remove(name: str, kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Take `add` back. What runs goes on; services that were started with the model go on to offer it."""

    def gone(known: Model | None) -> None:
        if known is None:
            raise ValueError(f"model {name} was not added; `headrace model list` shows those that were")

    run(_edit(servers(kafka, data_dir)[0], name, gone))
    print(f"model {name} is offered only where services were started with it")


@app.command("list")
def list_models(kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show the models that were added."""

    async def get() -> Any:
        async with opened(ModelStore(servers(kafka, data_dir)[0])) as store:
            return await store.all()

    table = Table("model", "fallback models")
    for name, stored in sorted(run(get()).items()):
        table.add_row(name, ", ".join(stored.record.fallback_models) or "none")
    Console().print(table)


@app.command("import")
def import_files(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or a folder as Hugging Face has it.")],
    name: Annotated[str, typer.Option(help="Catalogue id; default: what the file or folder is called.")] = "",
    models_dir: ModelsDir = DEFAULT_MODELS_DIR,
) -> None:
    """Put a model's files into the catalogue, with tokenizer, chat template and special tokens from them."""
    # Takes seconds, which the other commands do not need.
    from infra.model_import import import_model

    try:
        own = source.absolute().name.removesuffix(".gguf")
        spec = import_model(source, models_dir, name or own)
    except (ValueError, OSError) as e:
        raise fail(str(e)) from None
    print(f"model {spec.id} is in the catalogue: ./infra/up --model {spec.id}")


@app.command()
def plan(
    name: Annotated[
        str | None, typer.Argument(help="Catalogue id, or a published model; default: all.")
    ] = None,
    memory_gb: Annotated[float | None, typer.Option(min=0.001, help="Of one GPU, in 10^9 bytes.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="GPUs that it is split over.")] = None,
    weight_format: Annotated[Format | None, typer.Option(help="What its matrices are stored in.")] = None,
    kv_format: Annotated[Format | None, typer.Option(help="What keys and values are stored in.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Tokens of one sequence.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step.")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences of one step.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
    models_dir: ModelsDir = DEFAULT_MODELS_DIR,
) -> None:
    """Reckon what memory weights, a step and KV blocks take. Fails where a named model does not fit."""
    asked = Asked(
        memory_gb,
        tensor_parallel,
        weight_format,
        kv_format,
        max_model_len,
        max_num_batched_tokens,
        max_num_seqs,
    )
    try:
        found = list(plans(models_dir, name, asked))
    except (ValueError, OSError) as e:
        raise fail(str(e)) from None
    if as_json:
        for each in found:
            print(json.dumps(each.view()))
    else:
        table = Table(*(Column(name, no_wrap=True) for name in HEADINGS), box=None, padding=(0, 1, 0, 0))
        for each in found:
            table.add_row(*each.row())
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    if name is not None and (problem := found[0].plan.problem()):
        raise fail(f"{name}: {problem}: {found[0].plan.remedy()}")


async def _edit(bootstrap: str, name: str, change: Callable[[Model | None], Model | None]) -> None:
    async with opened(ModelStore(bootstrap)) as store:
        await store.edit(name, change)
