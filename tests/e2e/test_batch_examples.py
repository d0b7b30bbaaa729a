"""The examples of infra/BATCH_RECORDS.md, as they stand there, against a running stack."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.java import ensure_java
from infra.local.jvm import KafkaCommand
from infra.local.kafka_jars import ensure_kafka_jars
from infra.local.paths import PROJECT_ROOT, cache_dir
from tests.e2e.conftest import RunningStack

PAGE = PROJECT_ROOT / "infra" / "BATCH_RECORDS.md"
TIMEOUT_S = 120
TOOLS = {
    "kafka-console-producer.sh": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-console-consumer.sh": "org.apache.kafka.tools.consumer.ConsoleConsumer",
}


def examples() -> dict[str, tuple[str, str]]:
    """(language, text) of the one block of code under each heading that has one."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        assert len(blocks) <= 1, section
        if blocks:
            found[section.splitlines()[0]] = blocks[0]
    return found


EXAMPLES = examples()


def for_stack(text: str, running: RunningStack, tenant: str) -> str:
    """Addresses, tenant and model are the only things that a reader changes."""
    changes = {
        "127.0.0.1:9092": running.stack.bootstrap_servers,
        "gemma-3-270m": running.model,
        ".demo": f".{tenant}",
        "demo.": f"{tenant}.",
    }
    for there, here in changes.items():
        text = text.replace(there, here)
    return text


def run_example(name: str, running: RunningStack, tenant: str, path: str = "") -> list[str]:
    """What it prints, by line."""
    language, text = EXAMPLES[name]
    argv = [sys.executable, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*argv, for_stack(text, running, tenant)],
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def tenant(simulated_stack: RunningStack) -> str:
    simulated_stack.tenant("reader")
    return "reader"


def test_there_are_no_other_examples() -> None:
    assert list(EXAMPLES) == ["aiokafka", "confluent-kafka", "Kafka's console tools", "Avro"]
    assert f"({PAGE.relative_to(PROJECT_ROOT)})" in (PROJECT_ROOT / "README.md").read_text()


def test_aiokafka(simulated_stack: RunningStack, tenant: str) -> None:
    lines = run_example("aiokafka", simulated_stack, tenant)
    assert sorted(line.split()[0] for line in lines) == ["1", "2", "3"]
    assert all("'output_tokens': 12" in line for line in lines)


def test_confluent_kafka(simulated_stack: RunningStack, tenant: str) -> None:
    lines = run_example("confluent-kafka", simulated_stack, tenant)
    assert sorted(line.split()[0] for line in lines) == ["1", "2"]
    assert all(len(line) == 2 + 12 for line in lines)


def test_avro(simulated_stack: RunningStack, tenant: str) -> None:
    (line,) = run_example("Avro", simulated_stack, tenant)
    assert line == "1 {'input_tokens': 15, 'cached_tokens': 0, 'output_tokens': 12}"


def test_console_tools(simulated_stack: RunningStack, tmp_path: Path) -> None:
    simulated_stack.tenant("console")
    command = KafkaCommand(
        ensure_java(os.environ, print), ensure_kafka_jars(cache_dir(os.environ), os.environ, print)
    )
    for script, main_class in TOOLS.items():
        (tmp_path / script).write_text(f'#!/bin/sh\nexec {" ".join(command.argv(main_class))} "$@"\n')
        (tmp_path / script).chmod(0o755)
    lines = run_example("Kafka's console tools", simulated_stack, "console", str(tmp_path))
    assert len(lines) == 2, lines
    assert all("batch:from-console" in line and '"output_tokens":12' in line for line in lines)
