"""Who calls: API keys against the tenants of control.tenants."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.api.errors import ApiError
from schemas.api_keys import hash_key, is_key, key_id
from schemas.priority import PriorityClass
from schemas.records import Tenant

_NO_HASH = bytes(32)


@dataclass(frozen=True, slots=True)
class _Entry:
    sha256: bytes
    tenant: Tenant


class TenantBook:
    """The tenants as control.tenants last told them; found by key.

    Looked up is the key's id, its public beginning, which says nothing about the rest. That is compared as
    SHA-256, in constant time: neither the comparison nor what one would learn from it leads to a key.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._by_key_id: dict[str, list[_Entry]] = {}

    def put(self, name: str, tenant: Tenant | None) -> None:
        """Takes the newest record of a tenant; None deletes it, and its keys with it.

        Raises ValueError for a record that cannot be served; what was there before stays.
        """
        if tenant is not None and tenant.tier not in set(PriorityClass):
            raise ValueError(f"tenant {name}: there is no class {tenant.tier} to be its tier")
        self._forget_keys(name)
        if tenant is None:
            self._tenants.pop(name, None)
            return
        self._tenants[name] = tenant
        for key in tenant.keys:
            self._by_key_id.setdefault(key.key_id, []).append(_Entry(key.sha256, tenant))

    def authenticate(self, key: str) -> Tenant:
        """The tenant whose key it is.

        Raises ApiError 401, or 403 for a tenant that is disabled. Takes the same time for an unknown key
        as for a wrong one.
        """
        digest = hash_key(key)
        found: Tenant | None = None
        for entry in self._by_key_id.get(key_id(key), [_Entry(_NO_HASH, _NOBODY)]):
            if hmac.compare_digest(entry.sha256, digest):
                found = entry.tenant
        if found is None:
            raise ApiError(401, "invalid_api_key", "the API key is not known")
        return _enabled(found)

    def named(self, name: str) -> Tenant:
        """A tenant that was authenticated before. Raises ApiError 403 if it was deleted or disabled since."""
        found = self._tenants.get(name)
        if found is None:
            raise ApiError(403, "unknown_tenant", f"tenant {name} is no more")
        return _enabled(found)

    def _forget_keys(self, name: str) -> None:
        old = self._tenants.get(name)
        for key in old.keys if old is not None else ():
            kept = [e for e in self._by_key_id.get(key.key_id, ()) if e.tenant is not old]
            if kept:
                self._by_key_id[key.key_id] = kept
            else:
                self._by_key_id.pop(key.key_id, None)


def _enabled(tenant: Tenant) -> Tenant:
    if tenant.disabled:
        raise ApiError(403, "tenant_disabled", f"tenant {tenant.name} is disabled")
    return tenant


_NOBODY = Tenant(name="nobody", tier=0, keys=[], limits=[])


def presented_bearer(headers: Mapping[bytes, bytes]) -> str:
    """What `authorization: Bearer` gives, "" where there is none."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    return value.strip().decode("ascii", "replace") if scheme.lower() == b"bearer" else ""


def presented_key(headers: Mapping[bytes, bytes]) -> str:
    """The key in `authorization` or `x-api-key` (lower-case names). Raises ApiError 401 for what is none."""
    bearer = headers.get(b"authorization")
    if bearer is not None:
        scheme, _, value = bearer.partition(b" ")
        if scheme.lower() != b"bearer":
            raise ApiError(401, "invalid_api_key", "use 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    else:
        value = headers.get(b"x-api-key", b"")
    text = value.strip().decode("ascii", "replace")
    if not text:
        raise ApiError(
            401, "missing_api_key", "give an API key: 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        )
    if not is_key(text):
        raise ApiError(401, "invalid_api_key", "the API key is not known")
    return text
