"""/admin/v1/tenants: tenants made and changed over HTTP, by who has the key that is HEADRACE_ADMIN_KEY.

A change names the version it was thought of in If-Match, and is refused when another came first. Without
If-Match only the fields it names are changed, whatever came first.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from gateway import sse
from gateway.api.asking import asked
from gateway.auth import presented_bearer
from gateway.control_store import Stored, TenantStore, VersionConflictError
from gateway.exchange import JSON, Exchange
from gateway.serving import Serving
from gateway.topic_admin import TopicError
from schemas.api.bodies import decode_body
from schemas.api.errors import ApiError, bad_field
from schemas.api.tenant_admin import (
    NewKey,
    NewTenant,
    TenantChange,
    changed,
    created,
    not_found,
    view,
    with_key,
)
from schemas.api_keys import hash_key, new_key
from schemas.budgets import Standing, month_of
from schemas.clock import epoch_ms
from schemas.kafka_login import KafkaLogin
from schemas.records import Tenant

TENANTS_URL = "/admin/v1/tenants"
_MAX_BODY = 1 << 20
T = TypeVar("T")
B = TypeVar("B", bound=Struct)


async def list_tenants(serving: Serving, exchange: Exchange) -> None:
    store = await _store(serving, exchange)
    found = await asked_store(store.all())
    standings = await _standings(serving, [stored.record for stored in found.values()])
    data = [view(found[name].record, found[name].version, standings.get(name)) for name in sorted(found)]
    await exchange.respond(200, sse.to_json({"object": "list", "data": data}))


async def create_tenant(serving: Serving, exchange: Exchange) -> None:
    """201 with the tenant's first API key, and where the brokers ask for a login with that: both are stored
    nowhere."""
    store = await _store(serving, exchange)
    body = await body_of(serving, exchange, NewTenant)
    key, entry = new_key()
    tenant = created(body, entry)

    def make(known: Tenant | None) -> Tenant:
        if known is not None:
            raise ApiError(409, "tenant_exists", f"name: there is a tenant {body.name!r} already", "name")
        return tenant

    # 1. Refused before its topics are made, if it exists; 2. topics; 3. the tenant.
    known = await asked_store(store.get(body.name))
    make(None if known is None else known.record)
    login = await asked_store(store.open_topics(body.name))
    await _respond(serving, exchange, 201, await asked_store(store.edit(body.name, make)), key, login)


async def get_tenant(serving: Serving, exchange: Exchange) -> None:
    store = await _store(serving, exchange)
    found = await asked_store(store.get(_name(exchange)))
    if found is None:
        raise not_found(_name(exchange))
    await _respond(serving, exchange, 200, found)


async def update_tenant(serving: Serving, exchange: Exchange) -> None:
    store = await _store(serving, exchange)
    change = await body_of(serving, exchange, TenantChange)
    stored = await _edit(store, exchange, lambda tenant: changed(tenant, change))
    await _respond(serving, exchange, 200, stored)


async def delete_tenant(serving: Serving, exchange: Exchange) -> None:
    """Its keys and its Kafka login are good no more, and what it has waiting is refused. Its topics stay
    until they age out."""
    store = await _store(serving, exchange)
    name = _name(exchange)
    await _edit(store, exchange, lambda tenant: None)
    await asked_store(store.close_topics(name))
    await exchange.respond(200, sse.to_json({"object": "tenant", "name": name, "deleted": True}))


async def create_key(serving: Serving, exchange: Exchange) -> None:
    """Another API key, in place of those there are unless the body says `keep`."""
    store = await _store(serving, exchange)
    body = await body_of(serving, exchange, NewKey)
    key, entry = new_key()
    stored = await _edit(store, exchange, lambda tenant: with_key(tenant, entry, keep=body.keep))
    await _respond(serving, exchange, 201, stored, key)


async def _edit(
    store: TenantStore, exchange: Exchange, change: Callable[[Tenant], Tenant | None]
) -> Stored[Tenant] | None:
    name, expected = _name(exchange), expected_version(exchange)

    def apply(tenant: Tenant | None) -> Tenant | None:
        if tenant is None:
            raise not_found(name)
        return change(tenant)

    return await asked_store(store.edit(name, apply, expected))


async def asked_store(question: Awaitable[T]) -> T:
    """What the store says. Raises ApiError."""
    try:
        return await asked(question)
    except VersionConflictError as e:
        raise ApiError(412, "version_conflict", f"If-Match: {e}", "If-Match") from None
    except TopicError as e:
        raise ApiError(503, "broker_unavailable", str(e), None, 1_000) from None


def authorize(serving: Serving, exchange: Exchange) -> None:
    """Raises ApiError 401 for who does not show the administrator's key, 404 where there is none."""
    expected = serving.config.admin_key
    if not expected:
        raise ApiError(404, "not_found", f"there is nothing at {exchange.scope['path']}")
    # Digests, so that the time tells nothing of the key, its length neither.
    if not hmac.compare_digest(hash_key(presented_bearer(exchange.headers)), hash_key(expected)):
        raise ApiError(
            401, "invalid_admin_key", "use 'Authorization: Bearer KEY' with the administrator's key"
        )
    serving.check_open()


async def _store(serving: Serving, exchange: Exchange) -> TenantStore:
    authorize(serving, exchange)
    return await asked_store(serving.stores.tenants())


async def body_of(serving: Serving, exchange: Exchange, kind: type[B]) -> B:
    with serving.bodies.one() as take:
        data = await exchange.read_body(_MAX_BODY, serving.config.body_timeout_s, take)
    return decode_body(data or b"{}", kind)


async def _standings(serving: Serving, tenants: Sequence[Tenant]) -> dict[str, Standing]:
    """This month's, of those that have a budget."""
    if all(tenant.budget is None for tenant in tenants):
        return {}
    store = await asked_store(serving.stores.spend())
    return await asked_store(store.standings(tenants, month_of(epoch_ms())))


async def _respond(
    serving: Serving,
    exchange: Exchange,
    status: int,
    stored: Stored[Tenant] | None,
    key: str | None = None,
    login: KafkaLogin | None = None,
) -> None:
    assert stored is not None
    standings = await _standings(serving, [stored.record])
    body = view(stored.record, stored.version, standings.get(stored.record.name))
    if key is not None:
        body["key"] = key
    if login is not None:
        body["kafka"] = {"user": login.user, "password": login.password}
    headers = [JSON, (b"etag", b'"%d"' % stored.version), (b"cache-control", b"no-store")]
    await exchange.respond(status, sse.to_json(body), headers)


def _name(exchange: Exchange) -> str:
    name: str = exchange.scope["path_params"]["tenant"]
    return name


def expected_version(exchange: Exchange) -> int | None:
    """The version in If-Match. Raises ApiError 400."""
    value = exchange.headers.get(b"if-match")
    if value is None or value.strip() == b"*":
        return None
    digits = value.strip().removeprefix(b'"').removesuffix(b'"')
    if not digits.isdigit() or len(digits) > 18:
        raise bad_field("If-Match", "give the etag that it was last told with")
    return int(digits)
