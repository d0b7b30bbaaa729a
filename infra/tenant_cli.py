"""`headrace tenant`: tenants, their limits and their API keys."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from infra.command_line import DataDir, Kafka, fail, run, servers
from infra.local.paths import DEFAULT_DATA_DIR
from infra.tenants import TenantError, add_key, change_tenant, make_tenant, open_store
from schemas.api.bodies import convert_body
from schemas.api.errors import ApiError
from schemas.api.tenant_admin import TenantChange, changed, view
from schemas.priority import PriorityClass
from schemas.records import Tenant
from schemas.topics import Layout

app = typer.Typer(no_args_is_help=True, help="Tenants, their limits and their API keys.")

_UNLIMITED = "none"


def _limit(text: str) -> Any:
    return typer.Option(help=f"{text}, or 'none' for no limit; in each class of --class.")


Tokens = Annotated[str | None, _limit("Input and output tokens a minute")]
InputTokens = Annotated[str | None, _limit("Input tokens a minute")]
OutputTokens = Annotated[str | None, _limit("Output tokens a minute")]
Requests = Annotated[str | None, _limit("Requests a minute")]
Concurrent = Annotated[str | None, _limit("Requests at once")]
Enqueued = Annotated[str | None, _limit("Tokens waiting, of batch requests")]
MaxTokens = Annotated[str | None, _limit("Most output tokens of a request")]
Classes = Annotated[
    list[str] | None, typer.Option("--class", help="interactive, free or batch; default: all of them.")
]
Tier = Annotated[str | None, typer.Option(help="Highest class it may ask for: interactive, free or batch.")]
Weight = Annotated[float | None, typer.Option(help="Share of the fleet against other tenants.")]
AllowModel = Annotated[list[str] | None, typer.Option(help="A model it may ask for; all, if none is named.")]
Version = Annotated[
    int | None, typer.Option(help="Only if this is its version still, as `headrace tenant show` tells it.")
]


def _change(
    classes: list[str] | None,
    limits: dict[str, str | None],
    fields: dict[str, Any],
) -> TenantChange:
    """What the options ask for. Ends the command for what is none."""
    values: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    named = {name: _count(name, text) for name, text in limits.items() if text is not None}
    if named:
        values["limits"] = dict.fromkeys(classes or [c.label for c in PriorityClass], named)
    elif classes:
        raise fail("--class: name a limit with it")
    try:
        return convert_body(values, TenantChange)
    except ApiError as e:
        raise fail(e.message) from None


def _count(name: str, text: str) -> int | None:
    if text == _UNLIMITED:
        return None
    if not text.isdecimal():
        option = name.replace("_requests", "").replace("_", "-")
        raise fail(f"--{option}: a number or '{_UNLIMITED}', not {text!r}")
    return int(text)


def _changed(tenant: Tenant, change: TenantChange) -> Tenant:
    try:
        return changed(tenant, change)
    except ApiError as e:
        raise TenantError(e.message) from None


def _show(tenant: Tenant, version: int) -> None:
    print(json.dumps(view(tenant, version), indent=2))


@app.command()
def create(
    name: str,
    tier: Tier = None,
    weight: Weight = None,
    classes: Classes = None,
    tokens_per_minute: Tokens = None,
    input_tokens_per_minute: InputTokens = None,
    output_tokens_per_minute: OutputTokens = None,
    requests_per_minute: Requests = None,
    max_concurrent: Concurrent = None,
    max_enqueued_tokens: Enqueued = None,
    max_tokens: MaxTokens = None,
    allow_model: AllowModel = None,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Create a tenant with its batch topics, and print its API key, once."""
    limits = {
        "tokens_per_minute": tokens_per_minute,
        "input_tokens_per_minute": input_tokens_per_minute,
        "output_tokens_per_minute": output_tokens_per_minute,
        "requests_per_minute": requests_per_minute,
        "max_concurrent_requests": max_concurrent,
        "max_enqueued_tokens": max_enqueued_tokens,
        "max_tokens": max_tokens,
    }
    fields = {"tier": tier, "weight": weight, "allowed_models": allow_model or None}
    change = _change(classes, limits, fields)
    try:
        tenant = _changed(Tenant(name, PriorityClass.INTERACTIVE, [], []), change)
    except TenantError as e:
        raise fail(str(e)) from None
    print(run(make_tenant(*servers(kafka, data_dir), tenant)))


@app.command()
def update(
    name: str,
    tier: Tier = None,
    weight: Weight = None,
    classes: Classes = None,
    tokens_per_minute: Tokens = None,
    input_tokens_per_minute: InputTokens = None,
    output_tokens_per_minute: OutputTokens = None,
    requests_per_minute: Requests = None,
    max_concurrent: Concurrent = None,
    max_enqueued_tokens: Enqueued = None,
    max_tokens: MaxTokens = None,
    allow_model: AllowModel = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="It may ask for every model.")] = False,
    enable: Annotated[bool, typer.Option("--enable", help="Serve it again.")] = False,
    version: Version = None,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Change what is named, in force within two seconds, and show the tenant."""
    if all_models and allow_model:
        raise fail("--all-models cannot go with --allow-model")
    limits = {
        "tokens_per_minute": tokens_per_minute,
        "input_tokens_per_minute": input_tokens_per_minute,
        "output_tokens_per_minute": output_tokens_per_minute,
        "requests_per_minute": requests_per_minute,
        "max_concurrent_requests": max_concurrent,
        "max_enqueued_tokens": max_enqueued_tokens,
        "max_tokens": max_tokens,
    }
    fields = {"tier": tier, "weight": weight, "allowed_models": allow_model or None}
    change = _change(classes, limits, {**fields, "disabled": False if enable else None})
    if all_models:
        change.allowed_models = None
    _edit(name, change, version, kafka, data_dir)


@app.command()
def disable(
    name: str, version: Version = None, kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR
) -> None:
    """Refuse all its requests, until `headrace tenant update --enable`."""
    _edit(name, TenantChange(disabled=True), version, kafka, data_dir)


@app.command()
def delete(
    name: str, version: Version = None, kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR
) -> None:
    """Delete a tenant with its keys. Its topics and its bills stay."""
    run(change_tenant(servers(kafka, data_dir)[0], name, lambda tenant: None, version))
    print(f"tenant {name} is deleted")


@app.command()
def show(name: str, kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Print a tenant as JSON."""

    async def get() -> Any:
        async with open_store(servers(kafka, data_dir)[0], Layout()) as store:
            return await store.get(name)

    stored = run(get())
    if stored is None:
        raise fail(f"no tenant is called {name!r}; `headrace tenant list` shows them")
    _show(stored.tenant, stored.version)


@app.command()
def key(name: str, kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Print one more API key for a tenant, once."""
    print(run(add_key(servers(kafka, data_dir)[0], name)))


@app.command("rotate-key")
def rotate_key(
    name: str, version: Version = None, kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR
) -> None:
    """Print a new API key, once; the others are good no more."""
    print(run(add_key(servers(kafka, data_dir)[0], name, keep=False, expected=version)))


@app.command("list")
def list_tenants(kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show all tenants, their tiers, keys (by their first characters) and limits."""

    async def get() -> Any:
        async with open_store(servers(kafka, data_dir)[0], Layout()) as store:
            return await store.all()

    table = Table("tenant", "tier", "weight", "models", "keys", "limits", "disabled")
    for name, stored in sorted(run(get()).items()):
        tenant: Tenant = stored.tenant
        limits = [
            f"{label}: " + ", ".join(f"{key} {value}" for key, value in entry.items() if value is not None)
            for label, entry in view(tenant, stored.version)["limits"].items()
        ]
        table.add_row(
            name,
            PriorityClass(tenant.tier).label,
            f"{tenant.weight:g}",
            "all" if tenant.allowed_models is None else "\n".join(tenant.allowed_models) or "none",
            ", ".join(entry.key_id + "…" for entry in tenant.keys),
            "\n".join(limits) or "none",
            "yes" if tenant.disabled else "",
        )
    Console().print(table)


def _edit(name: str, change: TenantChange, version: int | None, kafka: str, data_dir: Any) -> None:
    bootstrap, _ = servers(kafka, data_dir)
    stored = run(change_tenant(bootstrap, name, lambda tenant: _changed(tenant, change), version))
    assert stored is not None
    _show(stored.tenant, stored.version)
