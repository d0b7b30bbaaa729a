"""Tenants as the log holds them: created, listed, changed through control.tenants."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.tenant_store import Stored, TenantStore, VersionConflictError
from schemas import topics
from schemas.api.tenant_admin import with_key
from schemas.api_keys import new_key
from schemas.codec import CodecError
from schemas.records import ClassLimits, Tenant
from schemas.topics import Layout


class TenantError(ValueError):
    """What was asked of a tenant cannot be done; the message says why."""


@asynccontextmanager
async def open_store(kafka: str, layout: Layout) -> AsyncIterator[TenantStore]:
    """Raises TimeoutError, KafkaError; TenantError for a change that came too late or a broken record."""
    store = TenantStore(kafka, layout)
    try:
        await store.start()
        yield store
    except (VersionConflictError, CodecError) as e:
        raise TenantError(str(e)) from e
    finally:
        await store.stop()


async def read_tenants(kafka: str) -> dict[str, Tenant]:
    """All tenants by name. Raises TimeoutError, KafkaError."""
    async with open_store(kafka, Layout()) as store:
        return {name: stored.tenant for name, stored in (await store.all()).items()}


async def create_tenant(
    kafka: str, layout: Layout, name: str, tier: int, limits: list[ClassLimits] | None = None
) -> str:
    """`make_tenant` of what most callers need to say."""
    return await make_tenant(kafka, layout, Tenant(name, tier, [], limits or []))


async def make_tenant(kafka: str, layout: Layout, tenant: Tenant) -> str:
    """Makes the tenant with its batch topics and returns its API key, which is stored nowhere.

    Raises ValueError for a bad name, TenantError when it exists.
    """
    name = topics.check_tenant(tenant.name)
    key, entry = new_key()
    tenant.keys.append(entry)

    def make(known: Tenant | None) -> Tenant:
        if known is not None:
            raise TenantError(f"tenant {name} exists; `headrace tenant key {name}` makes another key for it")
        return tenant

    async with open_store(kafka, layout) as store:
        found = await store.get(name)
        make(None if found is None else found.tenant)
        # 1. Its topics, so that who learns of the tenant finds them. A run that ends here is repeated whole.
        await store.create_topics(name)
        # 2. The tenant itself.
        await store.edit(name, make)
    return key


async def change_tenant(
    kafka: str, name: str, change: Callable[[Tenant], Tenant | None], expected: int | None = None
) -> Stored | None:
    """In force everywhere within two seconds. `change` gives None to delete the tenant.

    Raises TenantError where there is none, or its version is not `expected`.
    """

    def apply(tenant: Tenant | None) -> Tenant | None:
        if tenant is None:
            raise TenantError(f"no tenant is called {name!r}; `headrace tenant list` shows them")
        return change(tenant)

    async with open_store(kafka, Layout()) as store:
        return await store.edit(name, apply, expected)


async def add_key(kafka: str, name: str, *, keep: bool = True, expected: int | None = None) -> str:
    """A new key for a tenant that exists, beside those it has or in their place. Raises TenantError."""
    key, entry = new_key()

    def change(tenant: Tenant) -> Tenant:
        return with_key(tenant, entry, keep=keep)

    await change_tenant(kafka, name, change, expected)
    return key
