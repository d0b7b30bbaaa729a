"""What all `headrace` commands share: where the servers are, and how a failure is told."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from aiokafka.errors import KafkaError

from infra.endpoints import Endpoints
from infra.tenants import TenantError
from infra.topics.create import TopicError
from schemas.topics import Layout

T = TypeVar("T")
Kafka = Annotated[str, typer.Option(envvar="HEADRACE_KAFKA", help="Bootstrap servers; default: infra/up's.")]
DataDir = Annotated[Path, typer.Option(help="Data folder of the local stack.")]


def fail(message: str) -> typer.Exit:
    """Prints one clear line on stderr; raise what it returns."""
    print(f"headrace: {message}", file=sys.stderr)
    return typer.Exit(1)


def run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except (TenantError, TopicError, ValueError) as e:
        raise fail(str(e)) from None
    except (KafkaError, TimeoutError, OSError) as e:
        raise fail(f"Kafka does not answer ({type(e).__name__}): is the stack up?") from None


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
            return kafka, Layout(*counts)
        except ValueError as e:
            raise fail(f"HEADRACE_SHARDS, _WORKER_SLOTS and _GATEWAY_SLOTS must be counts: {e}") from None
    local = endpoints(data_dir)
    return local.kafka, Layout(local.shards, local.worker_slots, local.gateway_slots)
