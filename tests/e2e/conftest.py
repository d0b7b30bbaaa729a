"""Whole stacks on free ports and fresh data, driven from tests that block."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from infra.local.model import MODEL_ID, ensure_model
from infra.local.paths import DEFAULT_MODELS_DIR
from infra.local.services import StackConfig
from infra.local.stack import Stack
from infra.tenants import create_tenant
from schemas.catalog import SIMULATED_MODEL
from schemas.priority import PriorityClass
from schemas.records import ClassLimits

T = TypeVar("T")
CALL_TIMEOUT_S = 360.0
TENANT = "acme"
ADMIN_KEY = "the administrators' key of this stack"


class RunningStack:
    """A stack in a loop and thread of its own (the kernel ends its children with that thread)."""

    def __init__(self, config: StackConfig) -> None:
        self.stack = Stack(config)
        self.model = config.models[0]
        self.api_key = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stack")
        self._thread.start()

    def start(self) -> None:
        self.call(self.stack.start())

    def stop(self) -> None:
        self.call(self.stack.stop())

    def close(self) -> None:
        """Done again, it does nothing."""
        if self._loop.is_closed():
            return
        try:
            self.stop()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the stack's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_TIMEOUT_S)

    def tenant(
        self,
        name: str,
        tier: PriorityClass = PriorityClass.INTERACTIVE,
        limits: list[ClassLimits] | None = None,
    ) -> str:
        """Makes a tenant and returns its key."""
        kafka, layout = self.stack.bootstrap_servers, self.stack.config.layout
        return self.call(create_tenant(kafka, layout, name, tier, limits or []))

    def client(self, api_key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {api_key or self.api_key}"}
        return httpx.Client(base_url=self.stack.url(), headers=headers, timeout=60.0)

    def generate(self, **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/generate", json={"model": self.model, **body})

    def sql(self, query: str) -> list[list[str]]:
        """The rows of a query, as text."""
        answer = httpx.post(f"{self.stack.sql_url}/?default_format=TSV", content=query.encode(), timeout=30.0)
        assert answer.status_code == 200, answer.text
        return [line.split("\t") for line in answer.text.splitlines()]

    def metric(self, process: str, name: str) -> float:
        """Sum of all samples called `name` on a process's /metrics."""
        page = httpx.get(f"{self.stack.url(process)}/metrics", timeout=10.0).text
        samples = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        return sum(float(value) for key, value in samples if key.split("{")[0] == name)


@contextmanager
def running_stack(config: StackConfig) -> Iterator[RunningStack]:
    """A stack with a tenant; gone afterwards, whatever happens."""
    running = RunningStack(config)
    try:
        running.start()
        running.api_key = running.tenant(TENANT)
        yield running
    finally:
        running.close()


MakeStack = Callable[..., RunningStack]


def simulated_config(data_dir: Path, **changes: Any) -> StackConfig:
    settings = {
        "models_dir": data_dir,
        "models": (SIMULATED_MODEL,),
        "step_ms": 2.0,
        "settings": {"gateway": {"HEADRACE_ADMIN_KEY": ADMIN_KEY}},
        **changes,
    }
    return StackConfig(data_dir=data_dir, runner="simulated", **settings)


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[MakeStack]:
    """Starts simulated stacks of a test's own, with a tenant; they end with the test."""
    made: list[RunningStack] = []

    def make(**changes: Any) -> RunningStack:
        running = RunningStack(simulated_config(tmp_path / f"data-{len(made)}", **changes))
        made.append(running)
        running.start()
        running.api_key = running.tenant(TENANT)
        return running

    yield make
    for running in made:
        running.close()


SHARED_STACKS = ("gemma_stack", "simulated_stack")
_last_use: dict[pytest.Item, list[str]] = {}
_shared: dict[str, RunningStack] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one shared stack after those of the other, and then those with stacks of their own.

    A stack that nobody uses takes half a core, so a shared one ends with the last test that uses it.
    """
    items.sort(key=lambda item: min([SHARED_STACKS.index(name) for name in _uses(item)], default=2))
    last = {name: item for item in items for name in _uses(item)}
    for name, item in last.items():
        _last_use.setdefault(item, []).append(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    for name in _last_use.get(item, []):
        if name in _shared:
            _shared[name].close()


def _uses(item: pytest.Item) -> list[str]:
    """Names of shared stacks, as fixtures or as parameters that name them."""
    callspec = getattr(item, "callspec", None)
    parameters = [] if callspec is None else callspec.params.values()
    return [name for name in SHARED_STACKS if name in getattr(item, "fixturenames", ()) or name in parameters]


@pytest.fixture(scope="session")
def simulated_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """For tests that leave it as it is; each makes tenants of its own where it counts."""
    with running_stack(simulated_config(tmp_path_factory.mktemp("simulated"))) as running:
        _shared["simulated_stack"] = running
        yield running


@pytest.fixture(scope="session")
def gemma_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The real model in deterministic mode, for tests that leave it as it is."""
    ensure_model(DEFAULT_MODELS_DIR, print)
    config = StackConfig(
        data_dir=tmp_path_factory.mktemp("gemma"),
        models_dir=DEFAULT_MODELS_DIR,
        models=(MODEL_ID,),
        runner="torch",
        deterministic=True,
    )
    with running_stack(config) as running:
        _shared["gemma_stack"] = running
        yield running
