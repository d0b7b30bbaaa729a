import re

import pytest

from gateway.auth import TenantBook, presented_key
from schemas.api.errors import ApiError
from schemas.api_keys import hash_key, key_id, new_key
from schemas.records import ApiKey, Tenant


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def test_a_new_key_is_random_and_only_its_hash_is_kept() -> None:
    key, kept = new_key(7)
    other, _ = new_key(7)
    assert re.fullmatch(r"hr_[A-Za-z0-9_-]{43}", key)
    assert key != other
    assert kept == ApiKey(key_id=key[:11], sha256=hash_key(key), created_at=7)
    assert key.encode() not in repr(kept).encode()


def test_either_header_finds_the_tenant() -> None:
    book, (key, kept) = TenantBook(), new_key(0)
    tenant = Tenant("acme", 0, [kept], [])
    book.put("acme", tenant)
    assert book.authenticate(presented_key(bearer(key))) is tenant
    assert book.authenticate(presented_key({b"authorization": b"bearer   " + key.encode() + b" "})) is tenant
    assert book.authenticate(presented_key({b"x-api-key": key.encode()})) is tenant


def test_a_key_with_a_known_id_and_another_secret_is_refused() -> None:
    book, (key, kept) = TenantBook(), new_key(0)
    book.put("acme", Tenant("acme", 0, [kept], []))
    forged = key_id(key) + "A" * 35
    with pytest.raises(ApiError) as refusal:
        book.authenticate(forged)
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")
    assert forged not in refusal.value.message


def test_two_tenants_may_share_a_key_id() -> None:
    book = TenantBook()
    keys = ["hr_" + "A" * 8 + c * 35 for c in "xy"]
    for name, key in zip(("a", "b"), keys, strict=True):
        book.put(name, Tenant(name, 0, [ApiKey(key_id(key), hash_key(key), 0)], []))
    assert [book.authenticate(key).name for key in keys] == ["a", "b"]
    book.put("a", None)
    assert book.authenticate(keys[1]).name == "b"
    with pytest.raises(ApiError):
        book.authenticate(keys[0])


def test_the_newest_record_of_a_tenant_counts() -> None:
    book, (old, kept_old), (new, kept_new) = TenantBook(), new_key(0), new_key(0)
    book.put("acme", Tenant("acme", 0, [kept_old], []))
    book.put("acme", Tenant("acme", 1, [kept_new], []))
    assert book.authenticate(new).tier == 1
    with pytest.raises(ApiError):
        book.authenticate(old)
    book.put("acme", Tenant("acme", 1, [kept_new], [], disabled=True))
    with pytest.raises(ApiError) as refusal:
        book.authenticate(new)
    assert (refusal.value.status, refusal.value.code) == (403, "tenant_disabled")


def test_a_tier_that_is_no_class_is_refused_and_the_old_record_stays() -> None:
    book, (key, kept) = TenantBook(), new_key(0)
    book.put("acme", Tenant("acme", 0, [kept], []))
    with pytest.raises(ValueError, match=r"acme.*class 7"):
        book.put("acme", Tenant("acme", 7, [kept], []))
    assert book.authenticate(key).tier == 0


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b""},
        {b"authorization": b"Bearer"},
        {b"authorization": b"Basic YTpi"},
        {b"x-api-key": b"\xff\xfe"},
        {b"x-api-key": b"hr_short"},
        bearer("hr_" + "a" * 43),
    ],
)
def test_what_is_no_known_key_is_401(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(ApiError) as refusal:
        TenantBook().authenticate(presented_key(headers))
    assert refusal.value.status == 401
