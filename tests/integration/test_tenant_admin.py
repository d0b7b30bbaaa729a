"""Tenants made and changed over a real broker: the administrators' API and the command line."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.tenant_store import TenantStore, VersionConflictError
from infra.cli import app
from schemas.api_keys import hash_key
from schemas.records import ClassLimits, Tenant
from schemas.topics import Layout
from tests.gateway_factories import Call, Stand
from tests.own_broker import own_broker

LAYOUT = Layout(shards=2, worker_slots=2, gateway_slots=2)
ADMIN_KEY = "an administrators' key of 32 or more"
URL = "/admin/v1/tenants"


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_broker(tmp_path_factory.mktemp("broker"), LAYOUT) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
async def stand(bootstrap: str) -> AsyncIterator[Stand]:
    stand = Stand(kafka=bootstrap, admin_key=ADMIN_KEY)
    yield stand
    await stand.serving.close_store()


async def ask(stand: Stand, method: str, path: str, body: object = None, **headers: str) -> Call:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    data = b"" if body is None else json.dumps(body).encode()
    call = stand.call(method, path, body=data, key=ADMIN_KEY, headers=pairs)
    async with asyncio.timeout(30):
        await call.task
    return call


async def test_a_tenant_from_its_making_to_its_end(stand: Stand) -> None:
    call = await ask(stand, "POST", URL, {"name": "acme", "limits": {"free": {"tokens_per_minute": 100}}})
    made = call.json()
    assert (call.status, made["name"]) == (201, "acme")
    key, etag = made.pop("key"), call.headers[b"etag"].decode()
    assert (await ask(stand, "GET", f"{URL}/acme")).json() == made
    again = await ask(stand, "POST", URL, {"name": "acme"})
    assert (again.status, again.json()["error"]["code"]) == (409, "tenant_exists")
    call = await ask(stand, "PATCH", f"{URL}/acme", {"weight": 3}, if_match=etag)
    assert (call.status, call.json()["weight"]) == (200, 3)
    assert call.json()["limits"] == made["limits"]
    late = await ask(stand, "PATCH", f"{URL}/acme", {"disabled": True}, if_match=etag)
    assert (late.status, late.json()["error"]["code"]) == (412, "version_conflict")
    rotated = (await ask(stand, "POST", f"{URL}/acme/keys")).json()
    assert [each["key_id"] for each in rotated["keys"]] == [rotated["key"][:11]] != [key[:11]]
    listed = (await ask(stand, "GET", URL)).json()["data"]
    assert [each["name"] for each in listed] == ["acme"]
    assert (await ask(stand, "DELETE", f"{URL}/acme")).json()["deleted"] is True
    for method in ("GET", "PATCH", "DELETE"):
        gone = await ask(stand, method, f"{URL}/acme", {} if method == "PATCH" else None)
        assert (gone.status, gone.json()["error"]["code"]) == (404, "tenant_not_found")


async def test_only_who_has_the_key_is_served_and_where_there_is_none_nobody(stand: Stand) -> None:
    for key in (None, "hr_" + "x" * 43, ADMIN_KEY + "x"):
        call = await stand.call("GET", URL, key=key).finish()
        assert (call.status, call.json()["error"]["code"]) == (401, "invalid_admin_key")
    call = await Stand().call("GET", URL, key="").finish()
    assert (call.status, call.json()["error"]["code"]) == (404, "not_found")


async def test_two_who_change_a_tenant_at_a_time_do_not_overwrite_one_another(bootstrap: str) -> None:
    stores = [TenantStore(bootstrap, LAYOUT) for _ in range(3)]
    for store in stores:
        await store.start()
    try:
        first = await stores[0].edit("shared", lambda _: Tenant("shared", 0, [], []))
        assert first is not None

        async def bump(store: TenantStore, field: str) -> None:
            def change(tenant: Tenant | None) -> Tenant:
                assert tenant is not None
                (limits,) = tenant.limits or [ClassLimits(0)]
                count = getattr(limits, field) or 0
                setattr(limits, field, count + 1)
                return Tenant("shared", 0, [], [limits])

            for _ in range(10):
                await edit_until_it_counts(store, change)

        async def edit_until_it_counts(store: TenantStore, change: Any) -> None:
            while True:
                try:
                    await store.edit("shared", change)
                    return
                except VersionConflictError:
                    continue

        await asyncio.gather(
            bump(stores[0], "tokens_per_minute"),
            bump(stores[1], "tokens_per_minute"),
            bump(stores[2], "requests_per_minute"),
        )
        for store in stores:
            stored = await store.get("shared")
            assert stored is not None
            assert stored.tenant.limits == [ClassLimits(0, tokens_per_minute=20, requests_per_minute=10)]
        with pytest.raises(VersionConflictError):
            await stores[0].edit("shared", lambda _: None, expected=first.version)
    finally:
        for store in stores:
            await store.stop()


def test_the_command_line_does_the_same(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA", bootstrap)
    runner = CliRunner()

    def headrace(*args: str) -> str:
        result = runner.invoke(app, ["tenant", *args])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    key = headrace("create", "cli", "--tier", "free", "--tokens-per-minute", "100", "--allow-model", "m")
    shown = json.loads(headrace("show", "cli"))
    assert shown["keys"][0]["key_id"] == key[:11]
    assert len(hash_key(key)) == 32
    assert (shown["tier"], shown["allowed_models"]) == ("free", ["m"])
    assert shown["limits"]["batch"]["tokens_per_minute"] == 100
    version = str(shown["version"])
    args = ("--class", "free", "--tokens-per-minute", "none", "--max-tokens", "7", "--all-models")
    changed = json.loads(headrace("update", "cli", *args, "--version", version))
    assert "free" in changed["limits"]
    assert (changed["limits"]["free"]["tokens_per_minute"], changed["allowed_models"]) == (None, None)
    assert changed["limits"]["batch"]["tokens_per_minute"] == 100
    late = runner.invoke(app, ["tenant", "disable", "cli", "--version", version])
    assert late.exit_code == 1
    assert "changed meanwhile" in late.stderr
    assert json.loads(headrace("disable", "cli"))["disabled"] is True
    assert "cli" in headrace("list")
    assert headrace("rotate-key", "cli") != key
    headrace("delete", "cli")
    assert runner.invoke(app, ["tenant", "show", "cli"]).exit_code == 1
