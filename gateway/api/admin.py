"""/admin/v1/tenants: tenants made and changed over HTTP, by who has the key that is HEADRACE_ADMIN_KEY.

A change names the version it was thought of in If-Match, and is refused when another came first. Without
If-Match only the fields it names are changed, whatever came first.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiokafka.errors import KafkaError
from msgspec import Struct

from gateway import sse
from gateway.auth import presented_bearer
from gateway.exchange import JSON, Exchange
from gateway.serving import Serving
from gateway.tenant_store import Stored, TenantStore, VersionConflictError
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
from schemas.records import Tenant

TENANTS_URL = "/admin/v1/tenants"
_MAX_BODY = 1 << 20
T = TypeVar("T")
B = TypeVar("B", bound=Struct)


async def list_tenants(serving: Serving, exchange: Exchange) -> None:
    store = await _store(serving, exchange)
    found = await _asked(store.all())
    data = [view(found[name].tenant, found[name].version) for name in sorted(found)]
    await exchange.respond(200, sse.to_json({"object": "list", "data": data}))


async def create_tenant(serving: Serving, exchange: Exchange) -> None:
    """201 with the tenant's first API key, which is stored nowhere."""
    store = await _store(serving, exchange)
    body = await _body(serving, exchange, NewTenant)
    key, entry = new_key()
    tenant = created(body, entry)

    def make(known: Tenant | None) -> Tenant:
        if known is not None:
            raise ApiError(409, "tenant_exists", f"name: there is a tenant {body.name!r} already", "name")
        return tenant

    # 1. Refused before its topics are made, if it exists; 2. topics; 3. the tenant.
    known = await _asked(store.get(body.name))
    make(None if known is None else known.tenant)
    await _asked(store.create_topics(body.name))
    await _respond(exchange, 201, await _asked(store.edit(body.name, make)), key)


async def get_tenant(serving: Serving, exchange: Exchange) -> None:
    store = await _store(serving, exchange)
    found = await _asked(store.get(_name(exchange)))
    if found is None:
        raise not_found(_name(exchange))
    await _respond(exchange, 200, found)


async def update_tenant(serving: Serving, exchange: Exchange) -> None:
    store = await _store(serving, exchange)
    change = await _body(serving, exchange, TenantChange)
    await _respond(exchange, 200, await _edit(store, exchange, lambda tenant: changed(tenant, change)))


async def delete_tenant(serving: Serving, exchange: Exchange) -> None:
    """Its keys are good no more, and what it has waiting is refused. Its topics stay until they age out."""
    store = await _store(serving, exchange)
    name = _name(exchange)
    await _edit(store, exchange, lambda tenant: None)
    await exchange.respond(200, sse.to_json({"object": "tenant", "name": name, "deleted": True}))


async def create_key(serving: Serving, exchange: Exchange) -> None:
    """Another API key, in place of those there are unless the body says `keep`."""
    store = await _store(serving, exchange)
    body = await _body(serving, exchange, NewKey)
    key, entry = new_key()
    stored = await _edit(store, exchange, lambda tenant: with_key(tenant, entry, keep=body.keep))
    await _respond(exchange, 201, stored, key)


async def _edit(
    store: TenantStore, exchange: Exchange, change: Callable[[Tenant], Tenant | None]
) -> Stored | None:
    name, expected = _name(exchange), _expected(exchange)

    def apply(tenant: Tenant | None) -> Tenant | None:
        if tenant is None:
            raise not_found(name)
        return change(tenant)

    return await _asked(store.edit(name, apply, expected))


async def _asked(question: Awaitable[T]) -> T:
    """What the store says. Raises ApiError."""
    try:
        return await question
    except VersionConflictError as e:
        raise ApiError(412, "version_conflict", f"If-Match: {e}", "If-Match") from None
    except TopicError as e:
        raise ApiError(503, "broker_unavailable", str(e), None, 1_000) from None
    except (TimeoutError, KafkaError):
        raise ApiError(503, "broker_unavailable", "Kafka does not answer; try again", None, 1_000) from None


async def _store(serving: Serving, exchange: Exchange) -> TenantStore:
    """For who shows the administrator's key. Raises ApiError 404 where there is none, 401 for another."""
    expected = serving.config.admin_key
    if not expected:
        raise ApiError(404, "not_found", f"there is nothing at {exchange.scope['path']}")
    # Digests, so that the time tells nothing of the key, its length neither.
    if not hmac.compare_digest(hash_key(presented_bearer(exchange.headers)), hash_key(expected)):
        raise ApiError(
            401, "invalid_admin_key", "use 'Authorization: Bearer KEY' with the administrator's key"
        )
    serving.check_open()
    return await _asked(serving.tenant_store())


async def _body(serving: Serving, exchange: Exchange, kind: type[B]) -> B:
    with serving.bodies.one() as take:
        data = await exchange.read_body(_MAX_BODY, serving.config.body_timeout_s, take)
    return decode_body(data or b"{}", kind)


async def _respond(exchange: Exchange, status: int, stored: Stored | None, key: str | None = None) -> None:
    assert stored is not None
    body = view(stored.tenant, stored.version)
    if key is not None:
        body["key"] = key
    headers = [JSON, (b"etag", b'"%d"' % stored.version), (b"cache-control", b"no-store")]
    await exchange.respond(status, sse.to_json(body), headers)


def _name(exchange: Exchange) -> str:
    name: str = exchange.scope["path_params"]["tenant"]
    return name


def _expected(exchange: Exchange) -> int | None:
    """The version in If-Match. Raises ApiError 400."""
    value = exchange.headers.get(b"if-match")
    if value is None or value.strip() == b"*":
        return None
    digits = value.strip().removeprefix(b'"').removesuffix(b'"')
    if not digits.isdigit() or len(digits) > 18:
        raise bad_field("If-Match", "give the etag that the tenant was last told with")
    return int(digits)
