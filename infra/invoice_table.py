"""An invoice for people."""

from rich.console import Console
from rich.table import Table

from infra.invoice import Invoice, plain, rounded


def show_invoice(invoice: Invoice, console: Console) -> None:
    """Prints the lines, the totals, and what has no price."""
    table = Table("model", "class", "kind", title=f"{invoice.tenant}, {invoice.month:%Y-%m}")
    for name in ("tokens", "a million", "amount"):
        table.add_column(name, justify="right")
    table.add_column("price of")
    for line in invoice.lines:
        table.add_row(
            line.model,
            line.priority,
            line.kind.replace("_", " "),
            f"{line.tokens:,}",
            "no price" if line.price is None else f"{plain(line.price)} {line.currency}",
            "" if line.amount is None else f"{plain(line.amount)} {line.currency}",
            (line.price_valid_from or "").removesuffix(".000"),
        )
    console.print(table)
    for currency, total in sorted(invoice.totals.items()):
        console.print(f"total {plain(rounded(total))} {currency} ({plain(total)} exactly)")
    if not invoice.lines:
        console.print("nothing was used")
    if not invoice.complete:
        console.print(f"[bold]{invoice.unpriced_tokens:,} tokens have no price[/] and are in no total")
