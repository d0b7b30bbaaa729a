"""`headrace tenant`: tenants, their limits and their API keys."""

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gateway.control_store import Stored
from infra.command_line import DataDir, Kafka, fail, run, servers
from infra.local.paths import DEFAULT_DATA_DIR
from infra.spend import read_standings
from infra.tenants import (
    TenantError,
    add_key,
    change_tenant,
    delete_tenant,
    make_tenant,
    new_login,
    open_store,
)
from schemas.api.bodies import convert_body
from schemas.api.errors import ApiError
from schemas.api.tenant_admin import TenantChange, changed, limit_descriptions, view
from schemas.budgets import Standing, plain
from schemas.kafka_login import KafkaLogin
from schemas.priority import PriorityClass
from schemas.records import Tenant
from schemas.topics import Layout

app = typer.Typer(no_args_is_help=True, help="Tenants, their limits and their API keys.")

_UNLIMITED = "none"


Classes = Annotated[
    list[str] | None, typer.Option("--class", help="interactive, free or batch; default: all of them.")
]
Tier = Annotated[str | None, typer.Option(help="Highest class it may ask for: interactive, free or batch.")]
Weight = Annotated[float | None, typer.Option(help="Share of the fleet against other tenants.")]
AllowModel = Annotated[list[str] | None, typer.Option(help="A model it may ask for; all, if none is named.")]
Budget = Annotated[
    str | None, typer.Option(help=f"What it may spend in a month (UTC), or '{_UNLIMITED}' for what it will.")
]
Currency = Annotated[
    str | None, typer.Option("--budget-currency", help="Of the budget, as prices have it; default: USD.")
]
AlertAt = Annotated[
    list[int] | None,
    typer.Option("--budget-alert", help="Percent of it at which operators are told, once; default: 80."),
]
HardStop = Annotated[
    bool | None,
    typer.Option(
        "--budget-stop/--no-budget-stop", help="New requests are refused when it is spent; default: they are."
    ),
]
Version = Annotated[
    int | None, typer.Option(help="Only if this is its version still, as `headrace tenant show` tells it.")
]


def _takes_limits(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command an option for each limit there is; it gets those as `limits`, by name."""
    signature = inspect.signature(command)
    descriptions = limit_descriptions()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_limit(name, text))
        for name, text in descriptions.items()
    ]
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters += options if parameter.name == "limits" else [parameter]

    def run_command(**values: Any) -> None:
        command(limits={name: values.pop(name) for name in descriptions}, **values)

    run_command.__name__, run_command.__doc__ = command.__name__, command.__doc__
    run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run_command.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
    return run_command


def _limit(name: str, description: str) -> Any:
    text = f"{description}, or '{_UNLIMITED}' for no limit; in each class of --class."
    return Annotated[str | None, typer.Option(_option(name), help=text)]


def _option(name: str) -> str:
    return "--" + name.removesuffix("_requests").replace("_", "-")


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


def _budget(
    amount: str | None, currency: str | None, alert_percents: list[int] | None, hard_stop: bool | None
) -> dict[str, Any] | None:
    """The named fields; None where none is named."""
    named = {
        "amount": amount,
        "currency": currency,
        "alert_percents": alert_percents or None,
        "hard_stop": hard_stop,
    }
    return {name: value for name, value in named.items() if value is not None} or None


def _count(name: str, text: str) -> int | None:
    if text == _UNLIMITED:
        return None
    if not text.isdecimal():
        raise fail(f"{_option(name)}: a number or '{_UNLIMITED}', not {text!r}")
    return int(text)


def _changed(tenant: Tenant, change: TenantChange) -> Tenant:
    try:
        return changed(tenant, change)
    except ApiError as e:
        raise TenantError(e.message) from None


def _show(stored: Stored[Tenant], kafka: str) -> None:
    standing = run(read_standings(kafka, [stored.record])).get(stored.record.name)
    print(json.dumps(view(stored.record, stored.version, standing), indent=2))


@app.command()
@_takes_limits
def create(
    name: str,
    tier: Tier = None,
    weight: Weight = None,
    classes: Classes = None,
    *,
    limits: dict[str, str | None],
    allow_model: AllowModel = None,
    budget: Budget = None,
    budget_currency: Currency = None,
    budget_alert: AlertAt = None,
    budget_stop: HardStop = None,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Create a tenant with its batch topics, and print its API key, once. Where the brokers ask for a login
    print that of its Kafka clients below."""
    named = _budget(budget, budget_currency, budget_alert, budget_stop)
    fields = {"tier": tier, "weight": weight, "allowed_models": allow_model or None, "budget": named}
    change = _change(classes, limits, fields)
    try:
        tenant = _changed(Tenant(name, PriorityClass.INTERACTIVE, [], []), change)
    except TenantError as e:
        raise fail(str(e)) from None
    access = run(make_tenant(*servers(kafka, data_dir), tenant))
    print(access.api_key)
    if access.login is not None:
        _print_login(access.login)


@app.command()
@_takes_limits
def update(
    name: str,
    tier: Tier = None,
    weight: Weight = None,
    classes: Classes = None,
    *,
    limits: dict[str, str | None],
    allow_model: AllowModel = None,
    budget: Budget = None,
    budget_currency: Currency = None,
    budget_alert: AlertAt = None,
    budget_stop: HardStop = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="It may ask for every model.")] = False,
    enable: Annotated[bool, typer.Option("--enable", help="Serve it again.")] = False,
    version: Version = None,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Change what is named, in force within two seconds, and show the tenant."""
    if all_models and allow_model:
        raise fail("--all-models cannot go with --allow-model")
    no_budget = budget == _UNLIMITED
    named = _budget(None if no_budget else budget, budget_currency, budget_alert, budget_stop)
    if no_budget and named:
        raise fail(f"--budget {_UNLIMITED} cannot go with what a budget is to be")
    fields = {"tier": tier, "weight": weight, "allowed_models": allow_model or None, "budget": named}
    change = _change(classes, limits, {**fields, "disabled": False if enable else None})
    if all_models:
        change.allowed_models = None
    if no_budget:
        change.budget = None
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
    """Delete a tenant with its keys and its Kafka login. Its topics and its bills stay."""
    run(delete_tenant(servers(kafka, data_dir)[0], name, version))
    print(f"tenant {name} is deleted")


@app.command()
def show(name: str, kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Print a tenant as JSON, with what it has spent of its budget this month."""
    bootstrap, _ = servers(kafka, data_dir)

    async def get() -> Any:
        async with open_store(bootstrap, Layout()) as store:
            return await store.get(name)

    stored = run(get())
    if stored is None:
        raise fail(f"no tenant is called {name!r}; `headrace tenant list` shows them")
    _show(stored, bootstrap)


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


@app.command("kafka-login")
def kafka_login(name: str, kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Print a new login for its Kafka clients, once; the one before is good no more."""
    _print_login(run(new_login(servers(kafka, data_dir)[0], name)))


def _print_login(login: KafkaLogin) -> None:
    print(f"{login.user}:{login.password}")


@app.command("list")
def list_tenants(kafka: Kafka = "", data_dir: DataDir = DEFAULT_DATA_DIR) -> None:
    """Show all tenants, their tiers, keys (by their first characters), limits, and budgets with what is spent
    of them this month."""
    bootstrap, _ = servers(kafka, data_dir)

    async def get() -> Any:
        async with open_store(bootstrap, Layout()) as store:
            found = await store.all()
        return found, await read_standings(bootstrap, [stored.record for stored in found.values()])

    found, standings = run(get())
    table = Table("tenant", "tier", "weight", "models", "keys", "limits", "budget", "spent", "disabled")
    for name, stored in sorted(found.items()):
        tenant: Tenant = stored.record
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
            "none" if tenant.budget is None else f"{tenant.budget.amount} {tenant.budget.currency}",
            _spent(standings.get(name)),
            "yes" if tenant.disabled else "",
        )
    Console().print(table)


def _spent(standing: Standing | None) -> str:
    if standing is None:
        return ""
    share = "" if standing.share is None else f" ({standing.share:.1%})"
    return plain(standing.spent) + share + (", stopped" if standing.stopped else "")


def _edit(name: str, change: TenantChange, version: int | None, kafka: str, data_dir: Any) -> None:
    bootstrap, _ = servers(kafka, data_dir)
    stored = run(change_tenant(bootstrap, name, lambda tenant: _changed(tenant, change), version))
    assert stored is not None
    _show(stored, bootstrap)
