"""A tenant is served until its budget is spent, others are not touched, and one that is raised lets it in."""

import time
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner, Result

from infra.cli import app
from tests.e2e.conftest import ADMIN_KEY, RunningStack
from tests.e2e.test_streams import eventually

# Two seconds, and what a busy machine takes to say so.
IN_FORCE_S = 5.0


@pytest.fixture(scope="module")
def running(simulated_stack: RunningStack) -> RunningStack:
    invoke(simulated_stack, "price", "set", simulated_stack.model, "--input", "0", "--output", "1")
    return simulated_stack


def invoke(running: RunningStack, *arguments: str) -> Result:
    found = CliRunner().invoke(app, [*arguments, "--kafka", running.stack.bootstrap_servers])
    assert found.exit_code == 0, found.output
    return found


def spend_of(running: RunningStack, name: str) -> dict[str, Any]:
    told = msgspec.json.decode(invoke(running, "tenant", "spend", "--json").output)
    return next(each for each in told if each["tenant"] == name)


def ask(running: RunningStack, key: str) -> httpx.Response:
    with running.client(key) as client:
        return client.post("/v1/generate", json={"model": running.model, "prompt": "hi", "max_tokens": 10})


def admin(running: RunningStack, name: str, **change: Any) -> None:
    with running.client(ADMIN_KEY) as client:
        answer = client.patch(f"/admin/v1/tenants/{name}", json=change)
        assert answer.status_code == 200, answer.text


def test_a_tenant_is_served_until_its_budget_is_spent(running: RunningStack) -> None:
    # Ten tokens cost 0.00001 and a budget of twice that is spent by the second answer.
    poor = invoke(
        running,
        "tenant",
        "create",
        "poor",
        "--budget",
        "0.00002",
        "--budget-alert",
        "50",
        "--budget-alert",
        "100",
    ).output.strip()
    rich = running.tenant("rich")
    assert ask(running, poor).status_code == 200
    eventually(lambda: spend_of(running, "poor")["alerted"] == ["0.00001 USD"], 60)
    assert ask(running, poor).status_code == 200
    eventually(lambda: spend_of(running, "poor")["stopped"], 60)
    refused = ask(running, poor)
    month = f"{datetime.now(UTC):%Y-%m}"
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "budget_exceeded"
    assert refused.json()["error"]["message"].startswith("budget: tenant 'poor' has spent 0.00002 of")
    assert month in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 60 or datetime.now(UTC).day > 27
    assert ask(running, rich).status_code == 200

    # What is told is the bill, and alerts are rows, each once.
    spent = spend_of(running, "poor")
    assert (spent["stopped"], spent["budget"], spent["month"]) == (True, "0.00002", month)
    (bill,) = running.sql("SELECT sum(cost) FROM costs WHERE tenant = 'poor'")
    assert float(bill[0]) == float(spent["spent"])
    alerts = running.sql(
        "SELECT percent, toFloat64(threshold) FROM budget_alerts WHERE tenant = 'poor' ORDER BY 1"
    )
    assert alerts == [["50", "0.00001"], ["100", "0.00002"]]
    assert running.metric("ledger-0", "headrace_ledger_budget_alerts_total") == 2

    # Raised: let in. Without a stop: whatever it spends.
    admin(running, "poor", budget={"amount": "1"})
    eventually(lambda: ask(running, poor).status_code == 200, IN_FORCE_S)
    admin(running, "poor", budget={"amount": "0.00002"})
    eventually(lambda: ask(running, poor).status_code == 429)
    admin(running, "poor", budget={"hard_stop": False})
    eventually(lambda: ask(running, poor).status_code == 200)
    # The thresholds of the first budget are not told again.
    assert running.metric("ledger-0", "headrace_ledger_budget_alerts_total") == 2


def test_lines_of_a_batch_wait_until_the_budget_is_raised(running: RunningStack) -> None:
    key = running.tenant("waiting")
    admin(running, "waiting", budget={"amount": "0"})
    eventually(lambda: ask(running, key).status_code == 429)
    line = {"custom_id": "1", "model": running.model, "prompt": "hi", "max_tokens": 3}
    with running.client(key) as client:
        lines = {"file": ("lines.jsonl", msgspec.json.encode(line))}
        file = client.post("/v1/files", files=lines, data={"purpose": "batch"}).json()
        asked = client.post("/v1/batches", json={"input_file_id": file["id"], "model": running.model})
        assert asked.status_code == 200, asked.text
        batch_id = asked.json()["batch_id"]

        def status() -> str:
            found: str = client.get(f"/v1/batches/{batch_id}").json()["status"]
            return found

        eventually(lambda: running.metric("ledger-0", "headrace_batch_open") == 1)
        time.sleep(1)
        assert status() == "in_progress"
        admin(running, "waiting", budget={"amount": "1"})
        eventually(lambda: status() == "completed")
