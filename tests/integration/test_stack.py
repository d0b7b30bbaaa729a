import asyncio
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from infra.local import verbs
from infra.local.child import ChildDiedError
from infra.local.health import http_ready
from infra.local.ports import PortTakenError, choose_port
from infra.local.services import SERVICES, Service, StackConfig, split_roles
from infra.local.stack import Stack, StackError
from infra.local.verbs import VerbsError
from schemas.handoff_records import WorkerRole
from schemas.topics import REQUESTS, Layout

# Answers /health/ready as a service does, tells the time of its end, and keeps its environment for the test.
SERVICE = """
import http.server, json, os, pathlib, signal, sys, time
name = sys.argv[1] + "-" + os.environ["HEADRACE_SLOT"]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({k: v for k, v in os.environ.items() if k.startswith("HEADRACE_")}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
def end(*_):
    with open(os.environ["ENDED"], "a") as file:
        file.write(name + "\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
http.server.HTTPServer(("127.0.0.1", int(os.environ["HEADRACE_HTTP_PORT"])), Handler).serve_forever()
"""


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def stand_in(name: str) -> Service:
    """The real table's entry of a service, with a small program in the place of its command."""
    return replace(SERVICES[name], argv=(sys.executable, "-c", SERVICE, name))


@pytest.fixture
def make_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stack]:
    monkeypatch.setenv("ENDED", str(tmp_path / "ended"))
    monkeypatch.setenv("HEADRACE_UNKNOWN", "not for services")

    def make(services: dict[str, Service] | None = None, **config: object) -> Stack:
        settings = {"data_dir": tmp_path / "data", "models_dir": tmp_path / "models", **config}
        table = services or {name: stand_in(name) for name in SERVICES}
        return Stack(StackConfig(**settings), services=table)  # type: ignore[arg-type]

    return make


async def environment_of(stack: Stack, name: str) -> dict[str, str]:
    def get() -> dict[str, str]:
        with urllib.request.urlopen(stack.url(name), timeout=5) as answer:
            environment: dict[str, str] = json.load(answer)
            return environment

    return await asyncio.to_thread(get)


async def role_of(stack: Stack, name: str) -> str:
    return (await environment_of(stack, name))["HEADRACE_WORKER_ROLE"]


async def test_a_stack_from_start_to_stop(make_stack: Callable[..., Stack], tmp_path: Path) -> None:
    stack = make_stack(
        workers=2,
        runner="simulated",
        step_ms=5.75,
        roles=(WorkerRole.PREFILL,),
        settings={"worker": {"HEADRACE_KV_MEMORY_MIB": "64"}},
    )
    async with stack:
        names = ["broker", "admission-0", "ledger-0", "worker-0", "worker-1", "gateway-0"]
        pids = [stack.child(name).pid for name in names]
        stack.check_alive()

        # Topics are there, and services are told where everything is, and nothing that is not theirs.
        admin = AIOKafkaAdminClient(bootstrap_servers=stack.bootstrap_servers)
        await admin.start()
        assert REQUESTS in await admin.list_topics()
        await admin.close()
        worker = await environment_of(stack, "worker-1")
        assert worker["HEADRACE_KAFKA"] == stack.bootstrap_servers
        assert worker["HEADRACE_SLOT"] == "1"
        assert worker["HEADRACE_RUNNER"] == "simulated"
        assert worker["HEADRACE_STEP_MS"] == "5.75"
        assert worker["HEADRACE_KV_MEMORY_MIB"] == "64"
        assert worker["HEADRACE_WORKER_ROLE"] == "unified"
        assert (await environment_of(stack, "worker-0"))["HEADRACE_WORKER_ROLE"] == "prefill"
        assert "HEADRACE_UNKNOWN" not in worker
        gateway = await environment_of(stack, "gateway-0")
        assert "HEADRACE_KV_MEMORY_MIB" not in gateway
        ledger = await environment_of(stack, "ledger-0")
        assert stack.sql_url == f"http://127.0.0.1:{ledger['HEADRACE_SQL_PORT']}"

        # A second stack on the same data is refused while this one runs.
        with pytest.raises(StackError, match=rf"data is in use by process {os.getpid()}: stop that one"):
            await make_stack().start()

    ended = (tmp_path / "ended").read_text().split()
    assert ended[0] == "gateway-0"
    assert set(ended[1:3]) == {"worker-0", "worker-1"}
    assert set(ended[3:]) == {"admission-0", "ledger-0"}
    assert not [pid for pid in pids if exists(pid)]


async def test_kill_and_restart_keep_slot_port_and_role(make_stack: Callable[..., Stack]) -> None:
    async with make_stack(workers=2, roles=split_roles(2)) as stack:
        roles = {name: await role_of(stack, name) for name in ("worker-0", "worker-1")}
        assert roles == {"worker-0": "prefill", "worker-1": "decode"}
        for name in ("worker-0", "broker"):
            watch = asyncio.ensure_future(stack.watch())
            before = (stack.child(name).pid, stack.url("worker-0"), stack.bootstrap_servers)
            stack.kill(name)
            await stack.restart(name)
            after = (stack.child(name).pid, stack.url("worker-0"), stack.bootstrap_servers)
            assert after[0] != before[0]
            assert after[1:] == before[1:]
            assert await role_of(stack, "worker-0") == "prefill"
            await asyncio.sleep(0.15)
            assert not watch.done()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

        watch = asyncio.ensure_future(stack.watch())
        await asyncio.sleep(0.01)
        os.kill(stack.child("ledger-0").pid, signal.SIGKILL)
        with pytest.raises(ChildDiedError, match=r"ledger-0 died with signal SIGKILL: see .*ledger-0\.log"):
            await asyncio.wait_for(watch, 2)
        with pytest.raises(KeyError, match="worker-7"):
            stack.kill("worker-7")


async def test_a_service_that_fails_ends_the_start_and_nothing_runs(make_stack: Callable[..., Stack]) -> None:
    services = {name: stand_in(name) for name in SERVICES}
    services["worker"] = replace(services["worker"], argv=(sys.executable, "-c", "exit('no weights')"))
    stack = make_stack(services)
    with pytest.raises(
        ChildDiedError, match=r"(?s)worker-0 died with exit 1: see .*worker-0\.log.*no weights"
    ):
        await stack.start()
    assert not stack.child("broker").running
    # The data folder is free again.
    services["worker"] = stand_in("worker")
    async with make_stack(services):
        pass


async def test_a_taken_port_is_known_before_anything_starts(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for name in ("kafka_port", "gateway_port", "sql_port"):
            with pytest.raises(PortTakenError, match=f"{name}: port {port} is in use"):
                await make_stack(**{name: port}).start()
    assert not (tmp_path / "data" / "kafka").exists()


async def test_wanted_ports_are_used(make_stack: Callable[..., Stack]) -> None:
    gateway, sql = choose_port(Random()), choose_port(Random())
    async with make_stack(gateway_port=gateway, sql_port=sql) as stack:
        assert stack.url() == f"http://127.0.0.1:{gateway}"
        assert stack.sql_url == f"http://127.0.0.1:{sql}"
        assert await http_ready(gateway)()
    assert not await http_ready(gateway)()


def test_a_wrong_configuration_names_every_field(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"workers must be 0 to 2 .*; gateway_port must be .*; 4 roles for 3"
    ):
        StackConfig(
            data_dir=tmp_path,
            models_dir=tmp_path,
            layout=Layout(worker_slots=2),
            workers=3,
            roles=split_roles(4),
            gateway_port=-1,
        )


def test_prompts_and_decoding_need_a_worker_each() -> None:
    assert [role.value for role in split_roles(3)] == ["prefill", "decode", "decode"]
    with pytest.raises(ValueError, match="cannot be both"):
        split_roles(1)


async def test_a_library_that_cannot_be_got_ends_the_start_before_anything_runs(
    make_stack: Callable[..., Stack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine without the library and without the tools that would get it.
    monkeypatch.setattr(verbs, "LIBRARY", "libibverbs.so.none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VerbsError, match=r"libibverbs\.so\.none is missing: install"):
        await make_stack(workers=2, roles=split_roles(2)).start()
    assert not (tmp_path / "data" / "kafka").exists()
