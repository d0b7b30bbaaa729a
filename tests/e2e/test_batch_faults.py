"""Processes die at any moment of a batch: every line has one answer, every item one row in the bill."""

import json
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from infra.local.child import ChildDiedError
from infra.local.model import MODEL_ID, ensure_model
from infra.local.paths import DEFAULT_MODELS_DIR
from infra.local.services import StackConfig
from infra.local.stack import BROKER
from schemas.api.batches import ENDED
from tests.e2e.conftest import MakeStack, RunningStack, running_stack

SERVICES = ("ledger-0", "admission-0", "worker-0", "gateway-0")


def make_lines(model: str, count: int, **body: Any) -> bytes:
    """Outputs of 20 to 23 tokens."""
    lines = [
        {
            "custom_id": f"n{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": model,
                "prompt": f"item {i}",
                "max_tokens": 20 + i % 4,
                "ignore_eos": True,
                **body,
            },
        }
        for i in range(count)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def start_batch(client: httpx.Client, lines: bytes) -> str:
    file = client.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"})
    asked = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch_id: str = client.post("/v1/batches", json=asked).json()["id"]
    return batch_id


def restart_the_dead(stack: RunningStack) -> None:
    """As whatever runs the processes would: also those that ended because another was dead."""
    workers = [f"worker-{slot}" for slot in range(1, stack.stack.config.workers)]
    for name in (BROKER, *SERVICES, *workers):
        if not stack.stack.child(name).running:
            with suppress(ChildDiedError):
                stack.call(stack.stack.restart(name))


def look(stack: RunningStack, client: httpx.Client, batch_id: str) -> dict[str, Any]:
    """The batch, as soon as a gateway answers."""
    deadline = time.monotonic() + 60
    while True:
        restart_the_dead(stack)
        try:
            answer = client.get(f"/v1/batches/{batch_id}", timeout=5.0)
            if answer.status_code == 200:
                batch: dict[str, Any] = answer.json()
                return batch
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_for_end(stack: RunningStack, client: httpx.Client, batch_id: str, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while (batch := look(stack, client, batch_id))["status"] not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.5)
    return batch


def check_each_once(stack: RunningStack, client: httpx.Client, batch: dict[str, Any], count: int) -> None:
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
    text = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    lines = [json.loads(line) for line in text.splitlines()]
    assert Counter(line["custom_id"] for line in lines) == Counter(f"n{i}" for i in range(count))
    used = 0
    for line in lines:
        wanted = 20 + int(line["custom_id"][1:]) % 4
        assert line["response"]["body"]["usage"]["completion_tokens"] == wanted
        used += wanted
    assert batch["usage"]["output_tokens"] == used
    sql = "SELECT count(), uniqExact(request_id), sum(output_tokens) FROM usage_final"
    deadline = time.monotonic() + 30
    while (rows := stack.sql(sql)) != [[str(count), str(count), str(used)]]:
        assert time.monotonic() < deadline, rows
        time.sleep(0.5)


def outlive(stack: RunningStack, doomed: list[str], count: int, seed: int) -> None:
    """kill -9 of all that is `doomed`, one or two at a time, while a batch of `count` lines runs."""
    rng = random.Random(seed)
    rng.shuffle(doomed)
    with stack.client() as client:
        batch_id = start_batch(client, make_lines(stack.model, count))
        while doomed:
            time.sleep(0.5 + 2 * rng.random())
            for name in [doomed.pop() for _ in range(min(len(doomed), rng.randrange(1, 3)))]:
                stack.stack.kill(name)
            restart_the_dead(stack)
        check_each_once(stack, client, wait_for_end(stack, client, batch_id, 150), count)


def test_a_batch_of_two_thousand_outlives_every_process(make_stack: MakeStack) -> None:
    stack = make_stack(workers=2, step_ms=100.0)
    outlive(stack, [*SERVICES, "worker-1", BROKER, "ledger-0"], 2_000, seed=1)


def test_a_batch_on_the_real_model_outlives_every_process(tmp_path: Path) -> None:
    ensure_model(DEFAULT_MODELS_DIR, print)
    config = StackConfig(data_dir=tmp_path, models_dir=DEFAULT_MODELS_DIR, models=(MODEL_ID,))
    with running_stack(config) as stack:
        outlive(stack, [*SERVICES, BROKER], 50, seed=2)
