"""Tenants made and changed over a real broker: the administrators' API and the command line."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from typer.testing import CliRunner

from gateway.control_store import TenantStore, VersionConflictError
from infra.cli import app
from schemas import topics
from schemas.api_keys import hash_key
from schemas.budgets import month_of, plain, spend_key
from schemas.codec import encode
from schemas.fleet import PRODUCER_SETTINGS
from schemas.records import Amount, ClassLimits, Spend, Tenant
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
    await stand.serving.stores.close()


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


async def tell_spend(bootstrap: str, name: str, amount: str) -> int:
    """As the ledger does; its offset."""
    spend = Spend(name, month_of(time.time_ns() // 1_000_000), [Amount("USD", amount)], ["5 USD"])
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, **PRODUCER_SETTINGS) as producer:
        key = spend_key(name, spend.month).encode()
        sent = await producer.send_and_wait(topics.SPEND, encode(spend), key=key, partition=0)
        offset: int = sent.offset
        return offset


async def test_a_budget_is_shown_with_what_is_spent_of_it(stand: Stand, bootstrap: str) -> None:
    made = (await ask(stand, "POST", URL, {"name": "thrifty", "budget": {"amount": "10"}})).json()
    assert (made["spend"]["spent"], made["spend"]["told_at"], made["spend"]["stopped"]) == ("0", None, False)
    await ask(stand, "POST", URL, {"name": "free"})
    for amount, stopped in (("2.50", False), ("10.000001", True)):
        offset, now = await tell_spend(bootstrap, "thrifty", amount), time.time() * 1_000
        spend = (await ask(stand, "GET", f"{URL}/thrifty")).json()["spend"]
        assert abs(spend.pop("told_at") - now) < 60_000
        assert spend == {
            "month": month_of(int(now)),
            "spent": plain(Decimal(amount)),
            "budget": "10",
            "currency": "USD",
            "share": float(amount) / 10 if not stopped else 1.0,
            "stopped": stopped,
            "alerted": ["5 USD"],
            "offset": offset,
        }
    listed = {each["name"]: each["spend"] for each in (await ask(stand, "GET", URL)).json()["data"]}
    assert (listed["thrifty"]["stopped"], listed["free"]) == (True, None)
    raised = (await ask(stand, "PATCH", f"{URL}/thrifty", {"budget": {"amount": "20"}})).json()
    assert (raised["spend"]["stopped"], raised["spend"]["share"]) == (False, 0.5)


def test_the_command_line_shows_what_is_spent(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA", bootstrap)
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    assert runner.invoke(app, ["tenant", "create", "spender", "--budget", "4"]).exit_code == 0
    asyncio.run(tell_spend(bootstrap, "spender", "5"))
    shown = json.loads(runner.invoke(app, ["tenant", "show", "spender"]).stdout)["spend"]
    assert (shown["spent"], shown["share"], shown["stopped"]) == ("5", 1.25, True)
    assert "5 (125.0%), stopped" in runner.invoke(app, ["tenant", "list"]).stdout
    assert "spender" in runner.invoke(app, ["tenant", "spend"]).stdout


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
            assert stored.record.limits == [ClassLimits(0, tokens_per_minute=20, requests_per_minute=10)]
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
