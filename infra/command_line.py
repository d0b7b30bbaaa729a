"""What all `headrace` commands share: where the servers are, and how a failure is told."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer
from aiokafka.errors import KafkaError

from infra.endpoints import Endpoints
from infra.local.broker import password_file
from infra.local.broker_properties import SUPER_USER
from infra.tenants import TenantError
from infra.topics.create import TopicError
from schemas.config import kafka_servers
from schemas.kafka_login import KafkaLogin, KafkaServers
from schemas.topic_check import MissingTopicsError
from schemas.topics import Layout

T = TypeVar("T")
Kafka = Annotated[str, typer.Option(envvar="HEADRACE_KAFKA", help="Bootstrap servers; default: infra/up's.")]
DataDir = Annotated[Path, typer.Option(help="Data folder of the local stack.")]
SqlUrl = Annotated[
    str, typer.Option(help="The SQL endpoint, or a ClickHouse server; default: infra/up's endpoint.")
]
SQL_TIMEOUT_S = 60.0


def fail(message: str) -> typer.Exit:
    """Prints one clear line on stderr; raise what it returns."""
    print(f"headrace: {message}", file=sys.stderr)
    return typer.Exit(1)


def run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except (TenantError, TopicError, MissingTopicsError, ValueError) as e:
        raise fail(str(e)) from None
    except (KafkaError, TimeoutError, OSError) as e:
        raise fail(f"Kafka does not answer ({type(e).__name__}): is the stack up?") from None


def ask_sql(url: str, query: str, output_format: str) -> str:
    """The answer to a read-only query on the billing database."""
    params = {"default_format": output_format, "database": "headrace"}
    try:
        answer = httpx.post(url, content=query.encode(), params=params, timeout=SQL_TIMEOUT_S)
    except httpx.HTTPError as e:
        where = httpx.URL(url).copy_with(userinfo=b"")
        raise fail(f"no answer from {where} ({type(e).__name__}): is the ledger up?") from None
    if answer.status_code != 200:
        raise fail(answer.text.strip())
    return answer.text


def endpoints(data_dir: Path) -> Endpoints:
    found = Endpoints.load(data_dir)
    if found is None:
        raise fail("no local stack is up: run ./infra/up, or name the servers with the options")
    return found


def servers(kafka: str, data_dir: Path) -> tuple[str, Layout]:
    """Bootstrap servers and the layout: from the options' environment, or the local stack."""
    if kafka:
        names = ("SHARDS", "WORKER_SLOTS", "GATEWAY_SLOTS")
        try:
            counts = [int(os.environ.get(f"HEADRACE_{name}", 4)) for name in names]
            return with_login(kafka), Layout(*counts)
        except ValueError as e:
            raise fail(f"HEADRACE_SHARDS, _WORKER_SLOTS and _GATEWAY_SLOTS must be counts: {e}") from None
    local = endpoints(data_dir)
    login = None
    if local.broker_auth:
        login = KafkaLogin(SUPER_USER, password_file(data_dir).read_text())
    return KafkaServers(local.kafka, login), Layout(local.shards, local.worker_slots, local.gateway_slots)


def with_login(kafka: str) -> KafkaServers:
    """The servers with the login that HEADRACE_KAFKA_USER and _PASSWORD_FILE (or _PASSWORD) name."""
    user, password, file, tls = (
        os.environ.get(f"HEADRACE_KAFKA_{name}", "") for name in ("USER", "PASSWORD", "PASSWORD_FILE", "TLS")
    )
    found, wrong = kafka_servers(
        kafka, user, password, Path(file) if file else None, tls=tls.lower() in ("1", "true", "yes", "on")
    )
    if wrong:
        raise fail("; ".join(wrong))
    return found
