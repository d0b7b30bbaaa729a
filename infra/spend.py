"""What tenants that have a budget have spent this month, beside it."""

from collections.abc import Iterable

from gateway.control_store import SpendStore
from infra.tenants import opened
from schemas.budgets import Standing, month_of
from schemas.clock import epoch_ms
from schemas.records import Tenant


async def read_standings(kafka: str, tenants: Iterable[Tenant]) -> dict[str, Standing]:
    """As the ledger told it last, by name; of those without a budget nothing.

    Raises TimeoutError, KafkaError, BudgetError.
    """
    found = [tenant for tenant in tenants if tenant.budget is not None]
    if not found:
        return {}
    async with opened(SpendStore(kafka)) as store:
        return await store.standings(found, month_of(epoch_ms()))
