"""A stack whose broker asks for a login: its services have theirs, and a tenant's clients another."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from infra.local.broker_properties import SUPER_USER
from infra.local.paths import PROJECT_ROOT
from schemas.kafka_login import KafkaLogin, KafkaServers
from tests.e2e.conftest import ADMIN_KEY, RunningStack
from tests.e2e.test_batch_by_topic import exchange
from tests.e2e.test_streams import eventually


def test_services_and_tenants_log_in(make_stack: Any) -> None:
    running: RunningStack = make_stack(broker_auth=True)
    assert running.generate(prompt="hi", max_tokens=3).json()["usage"]["output_tokens"] == 3

    stack = running.stack
    with running.client(ADMIN_KEY) as client:
        made = client.post("/admin/v1/tenants", json={"name": "loader"}).json()["kafka"]
    record = {"custom_id": "a", "model": running.model, "prompt": "hi", "max_tokens": 2}
    servers = KafkaServers(str(stack.bootstrap_servers), KafkaLogin(made["user"], made["password"]))
    assert exchange(running, "loader", [record], answers=1, kafka=servers)["a"]["usage"]["output_tokens"] == 2

    # A login that was lost: the command uses the servers as the services do.
    assert stack.broker is not None
    command = [sys.executable, "-m", "infra.cli", "tenant", "kafka-login", "loader"]
    environment = {
        **os.environ,
        "HEADRACE_KAFKA": str(servers),
        "HEADRACE_KAFKA_USER": SUPER_USER,
        "HEADRACE_KAFKA_PASSWORD_FILE": str(stack.broker.password_file),
    }
    printed = subprocess.run(command, env=environment, cwd=PROJECT_ROOT, capture_output=True, text=True)
    user, password = printed.stdout.strip().split(":")
    servers = KafkaServers(str(servers), KafkaLogin(user, password))
    record["custom_id"] = "b"
    assert exchange(running, "loader", [record], answers=1, kafka=servers).keys() == {"b"}
    eventually(
        lambda: (
            running.sql("SELECT tenant, count() FROM usage_final GROUP BY 1 ORDER BY 1")
            == [["acme", "1"], ["loader", "2"]]
        )
    )
    command = [sys.executable, "-m", "infra.cli", "audit", "--since", "10m", "--settle", "0", "--json"]
    command += ["--sql", stack.sql_url, "--objects", str(stack.config.data_dir / "objects")]
    audited = subprocess.run(command, env=environment, cwd=PROJECT_ROOT, capture_output=True, text=True)
    assert audited.returncode == 0, audited.stderr
    assert json.loads(audited.stdout)["looked_at"]["ended"] == 3
    with running.client(ADMIN_KEY) as client:
        assert client.delete("/admin/v1/tenants/loader").json()["deleted"] is True
    with pytest.raises(KafkaConnectionError):
        exchange(running, "loader", [record], answers=1, kafka=servers)
    secret = stack.broker.password_file.read_text()
    for log in (stack.config.data_dir / "logs").iterdir():
        assert secret not in log.read_text(errors="replace"), log
