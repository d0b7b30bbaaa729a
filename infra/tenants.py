"""Tenants as the log holds them: created, listed, changed through control.tenants."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.control_store import ControlStore, Stored, TenantStore, VersionConflictError
from schemas import topics
from schemas.api.tenant_admin import with_key
from schemas.api_keys import new_key
from schemas.codec import CodecError
from schemas.kafka_login import KafkaLogin
from schemas.records import ClassLimits, Tenant
from schemas.topics import Layout

S = TypeVar("S", bound=ControlStore[Any])


class TenantError(ValueError):
    """What was asked of a tenant cannot be done; the message says why."""


def open_store(kafka: str, layout: Layout) -> AbstractAsyncContextManager[TenantStore]:
    """See `opened`."""
    return opened(TenantStore(kafka, layout))


@asynccontextmanager
async def opened(store: S) -> AsyncIterator[S]:
    """Raises TimeoutError, KafkaError; TenantError for a change that came too late or a broken record."""
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
        return {name: stored.record for name, stored in (await store.all()).items()}


async def create_tenant(
    kafka: str, layout: Layout, name: str, tier: int, limits: list[ClassLimits] | None = None
) -> str:
    """`make_tenant` of what most callers need to say, and are told."""
    return (await make_tenant(kafka, layout, Tenant(name, tier, [], limits or []))).api_key


@dataclass(frozen=True, slots=True)
class Access:
    """What a new tenant is told, once: nobody stores it. `login` is for its Kafka clients, where the brokers
    ask for one."""

    api_key: str
    login: KafkaLogin | None


async def make_tenant(kafka: str, layout: Layout, tenant: Tenant) -> Access:
    """Makes the tenant with its batch topics.

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
        make(None if found is None else found.record)
        # 1. Its topics, so that who learns of the tenant finds them. A run that ends here is repeated whole.
        login = await store.open_topics(name)
        # 2. The tenant itself.
        await store.edit(name, make)
    return Access(key, login)


async def delete_tenant(kafka: str, name: str, expected: int | None = None) -> None:
    """With its keys and its Kafka login; its topics stay until they age out.

    Raises TenantError, TopicError.
    """
    await change_tenant(kafka, name, lambda tenant: None, expected)
    async with open_store(kafka, Layout()) as store:
        await store.close_topics(name)


async def new_login(kafka: str, name: str) -> KafkaLogin:
    """In place of the tenant's last one. Raises TenantError where there is no such tenant, or no login."""
    async with open_store(kafka, Layout()) as store:
        if await store.get(name) is None:
            raise TenantError(f"no tenant is called {name!r}; `headrace tenant list` shows them")
        login = await store.new_login(name)
    if login is None:
        raise TenantError("these brokers ask for no login: HEADRACE_KAFKA_USER says as whom they are used")
    return login


async def change_tenant(
    kafka: str, name: str, change: Callable[[Tenant], Tenant | None], expected: int | None = None
) -> Stored[Tenant] | None:
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
