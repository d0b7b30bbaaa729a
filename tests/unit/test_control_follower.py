"""The control topics as both stream services read them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from fastavro import parse_schema, schemaless_writer

from schemas import records, topics
from schemas.codec import MARKER, _fingerprint, encode
from schemas.fleet import FleetView
from schemas.records import Join, Model, Tenant
from streams.control import ControlFollower
from streams.heartbeats import follow_heartbeats
from streams.membership import Membership
from tests.log_consumer import LogConsumer, Partition

AVRO_DIR = Path(records.__file__).parent / "avro"


def tenant(name: str) -> Tenant:
    return Tenant(name, 2, [], [])


class Reader:
    """A follower, and the tenants it told of."""

    def __init__(self) -> None:
        self.log = LogConsumer()
        self.view = FleetView()
        self.tenants: dict[str, Tenant | None] = {}
        membership = Membership("ledger", 0, self.view)
        self.models: dict[str, Model | None] = {}
        self.follower = ControlFollower(
            self.log, Partition, membership, self._on_tenant, self.models.__setitem__
        )

    def _on_tenant(self, name: str, tenant: Tenant | None) -> None:
        if name == "refused":
            raise ValueError("no such name")
        self.tenants[name] = tenant

    def put(self, name: str) -> None:
        self.log.append(topics.TENANTS, encode(tenant(name)), name.encode())


@asynccontextmanager
async def running(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(coroutine)
    try:
        async with asyncio.timeout(5):
            yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def newer_tenant(new_field: str) -> tuple[str, bytes]:
    """(schema, record) of a writer whose tenants have one more field."""
    schema = json.loads((AVRO_DIR / "Tenant.avsc").read_text())
    schema["fields"].append({"name": new_field, "type": "string", "default": ""})
    text = json.dumps(schema)
    body = BytesIO()
    fields = {"name": "new", "tier": 2, "keys": [], "limits": [], "weight": 1.0, "disabled": False}
    schemaless_writer(body, parse_schema(schema), {**fields, new_field: "x"})
    return text, MARKER + _fingerprint(parse_schema(json.loads(text))) + body.getvalue()


async def test_all_that_is_there_is_applied_from_the_beginning() -> None:
    reader = Reader()
    reader.put("demo")
    reader.put("gone")
    reader.log.append(topics.TENANTS, None, b"gone")
    reader.log.append(topics.EVENTS, encode(Join("worker", 3, b"n")))
    await reader.follower.read_to_end()
    assert reader.tenants == {"demo": tenant("demo"), "gone": None}
    assert reader.view.epoch_of("worker", 3) == 0


async def test_models_are_told_of_as_tenants_are() -> None:
    reader = Reader()
    reader.log.append(topics.MODELS, encode(Model("big", ["small"])), b"big")
    reader.log.append(topics.MODELS, encode(Model("gone")), b"gone")
    reader.log.append(topics.MODELS, encode(tenant("a tenant")), b"another kind")
    await reader.follower.read_to_end()
    assert reader.models == {"big": Model("big", ["small"]), "gone": Model("gone")}
    async with running(reader.follower.run()):
        reader.log.append(topics.MODELS, None, b"gone")
        await until(lambda: reader.models["gone"] is None)
    assert reader.tenants == {}


async def test_what_cannot_be_used_stops_nobody() -> None:
    reader = Reader()
    reader.log.append(topics.SCHEMAS, b"no schema")
    reader.log.append(topics.TENANTS, b"no record", b"broken")
    reader.log.append(topics.TENANTS, encode(Join("worker", 3, b"n")), b"another kind")
    reader.put("refused")
    reader.put("demo")
    reader.log.append(topics.EVENTS, b"no record")
    await reader.follower.read_to_end()
    assert reader.tenants == {"demo": tenant("demo")}


async def test_a_newer_writers_record_is_read_with_its_schema() -> None:
    schema, value = newer_tenant("met_at_start")
    reader = Reader()
    reader.log.append(topics.TENANTS, value, b"new")
    reader.log.append(topics.SCHEMAS, schema.encode())
    await reader.follower.read_to_end()
    assert reader.tenants == {"new": tenant("new")}


async def test_schemas_are_caught_up_with_while_it_follows() -> None:
    reader = Reader()
    await reader.follower.read_to_end()
    async with running(reader.follower.run()):
        schema, value = newer_tenant("met_while_following")
        reader.log.append(topics.SCHEMAS, schema.encode())
        await reader.follower.catch_up_schemas()
        reader.log.append(topics.TENANTS, value, b"new")
        await until(lambda: "new" in reader.tenants)
    assert reader.tenants == {"new": tenant("new")}


async def test_a_tenant_made_a_moment_ago_is_there_after_catching_up() -> None:
    reader = Reader()
    await reader.follower.read_to_end()
    async with running(reader.follower.run()):
        reader.put("new")
        await reader.follower.catch_up_tenants()
        assert reader.tenants == {"new": tenant("new")}


async def test_catching_up_with_schemas_that_nobody_reads_ends_in_time() -> None:
    reader = Reader()
    await reader.follower.read_to_end()
    reader.log.append(topics.SCHEMAS, b"{}")
    async with asyncio.timeout(5):
        await reader.follower.catch_up_schemas(timeout=0.01)


async def test_heartbeats_are_followed_from_now_on() -> None:
    log, view = LogConsumer(), FleetView()
    log.append(topics.HEARTBEATS, encode(records.Heartbeat("worker", 0, 1, b"n")))
    async with running(follow_heartbeats(log, Partition, Membership("ledger", 0, view))):
        await until(lambda: bool(log.places))
        log.append(topics.HEARTBEATS, encode(records.Heartbeat("worker", 1, 2, b"n")))
        await until(lambda: view.epoch_of("worker", 1) is not None)
    assert view.epoch_of("worker", 0) is None
