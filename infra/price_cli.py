"""`headrace price`: what tokens cost, by model, class and time."""

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gateway.control_store import PriceStore
from infra.command_line import DataDir, Kafka, fail, run, servers
from infra.local.paths import DEFAULT_DATA_DIR
from infra.tenants import opened
from schemas.prices import (
    PRICE_FIELDS,
    PriceError,
    check_price,
    discounted,
    parse_amount,
    price_key,
    valid_from_text,
)
from schemas.priority import PriorityClass
from schemas.records import Price

app = typer.Typer(no_args_is_help=True, help="What a million tokens cost, by model, class and time.")

Amount = Annotated[str, typer.Option(help="Of a million of them, for example 0.15.")]
Classes = Annotated[
    list[str] | None, typer.Option("--class", help="interactive, free or batch; default: all of them.")
]
From = Annotated[
    str,
    typer.Option(
        "--from", help="ISO 8601: for requests accepted from then on; default: now. UTC if not said."
    ),
]
Past = Annotated[
    bool, typer.Option("--past", help="--from may be past: what was used since then costs something else.")
]


@app.command("set")
def set_price(
    model: str,
    input_price: Annotated[str, typer.Option("--input", help="Of a million input tokens, for example 0.15.")],
    output_price: Annotated[str, typer.Option("--output", help="Of a million output tokens.")],
    cached_input_price: Annotated[
        str | None,
        typer.Option("--cached-input", help="Of a million cached input tokens; default: as other input."),
    ] = None,
    classes: Classes = None,
    batch_discount: Annotated[
        str, typer.Option(help="Percent that class batch costs less than what is named.")
    ] = "0",
    begins: From = "",
    past: Past = False,
    currency: Annotated[str, typer.Option(help="ISO 4217.")] = "USD",
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set what a model's tokens cost from a time on. The same model, class and time again replaces it."""
    valid_from = _time(begins, past)
    texts = (input_price, input_price if cached_input_price is None else cached_input_price, output_price)
    try:
        amounts = [parse_amount(name, text) for name, text in zip(PRICE_FIELDS, texts, strict=True)]
        percent = _percent(batch_discount)
        asked = _classes(classes)
        if percent and PriorityClass.BATCH not in asked:
            raise PriceError("batch_discount is of class batch, which --class does not name")
        prices = {}
        for priority in asked:
            less = percent if priority is PriorityClass.BATCH else Decimal(0)
            own = [f"{discounted(amount, less).normalize():f}" for amount in amounts]
            price = Price(model, priority, valid_from, currency, *own)
            key = price_key(model, priority, valid_from)
            prices[key] = check_price(key, price)
    except PriceError as e:
        raise fail(str(e)) from None

    async def put() -> None:
        async with opened(PriceStore(servers(kafka, data_dir)[0])) as store:
            for key, price in prices.items():
                await store.edit(key, lambda known, price=price: price)  # type: ignore[misc]

    run(put())
    for price in prices.values():
        print(_line(price))


@app.command()
def remove(
    model: str,
    begins: Annotated[str, typer.Option("--from", help="As `headrace price list` shows it.")],
    classes: Classes = None,
    past: Past = False,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Take a price back: the one before it is valid on."""
    valid_from = _time(begins, past)
    keys = [price_key(model, priority, valid_from) for priority in _classes(classes)]

    def gone(known: Price | None) -> None:
        if known is None:
            raise ValueError(
                f"there is no such price of {model}; `headrace price list` shows those there are"
            )

    async def take_out() -> None:
        async with opened(PriceStore(servers(kafka, data_dir)[0])) as store:
            for key in keys:
                await store.edit(key, gone)

    run(take_out())
    print(f"{len(keys)} price{'s' * (len(keys) > 1)} of {model} removed")


@app.command("list")
def list_prices(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    kafka: Kafka = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Show all prices there are, of all times."""

    async def get() -> Any:
        async with opened(PriceStore(servers(kafka, data_dir)[0])) as store:
            return await store.all()

    prices: list[Price] = [stored.record for stored in run(get()).values()]
    prices.sort(key=lambda price: (price.model, price.priority, price.valid_from))
    if as_json:
        print(json.dumps([_view(price) for price in prices], indent=2))
        return
    table = Table("model", "class", "valid from", "currency", "input", "cached input", "output")
    for price in prices:
        told = _view(price)
        table.add_row(*(told[name] for name in ("model", "class", "valid_from", "currency", *PRICE_FIELDS)))
    Console().print(table)


def _view(price: Price) -> dict[str, str]:
    told: dict[str, Any] = asdict(price)
    label = PriorityClass(told.pop("priority")).label
    return {**told, "class": label, "valid_from": valid_from_text(price.valid_from)}


def _line(price: Price) -> str:
    told = _view(price)
    amounts = ", ".join(
        f"{name.removesuffix('_price').replace('_', ' ')} {told[name]}" for name in PRICE_FIELDS
    )
    return f"{price.model} {told['class']} from {told['valid_from']}: {amounts} {price.currency} a million"


def _classes(labels: list[str] | None) -> list[PriorityClass]:
    known = {priority.label: priority for priority in PriorityClass}
    try:
        return [known[label] for label in labels or known]
    except KeyError as e:
        raise fail(f"--class: {e.args[0]!r} is none of {', '.join(known)}") from None


def _percent(text: str) -> Decimal:
    try:
        percent = Decimal(text)
    except InvalidOperation:
        raise PriceError(f"batch_discount is {text[:40]!r}, no number") from None
    if not 0 <= percent <= 100:
        raise PriceError(f"batch_discount is {text[:40]}, not 0 to 100")
    return percent


def _time(text: str, past: bool) -> int:
    """ms of the epoch."""
    now = int(time.time() * 1000)
    if not text:
        return now
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise fail(f"--from: {text!r} is no time; write 2026-11-01 or 2026-11-01T12:00:00Z") from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    valid_from = round(when.timestamp() * 1000)
    if valid_from < now and not past:
        raise fail(f"--from: {text} is past, and bills since then would change; say --past if they are to")
    return valid_from
