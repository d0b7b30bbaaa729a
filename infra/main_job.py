"""The three uses of a newcomer, shown on a running stack: a stream, batch records on a topic, a bill."""

import asyncio
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

import httpx
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from rich.console import Console
from rich.table import Table

from schemas import topics
from schemas.fleet import PRODUCER_SETTINGS
from schemas.kafka_login import client_settings

STREAM_TIMEOUT_S = 120.0
BATCH_TIMEOUT_S = 120.0
BILL_TIMEOUT_S = 30.0
# A base model continues text; it does not answer questions.
STREAM_PROMPT = "Kafka is a distributed event streaming platform. It is used to"
BATCH_PROMPTS = ("The capital of France is", "Water boils at", "The three primary colours are")
BILL_SQL = """\
SELECT tenant, model, class, sum(requests) AS requests, sum(b.input_tokens) AS input_tokens,
       sum(b.output_tokens) AS output_tokens
FROM billing AS b GROUP BY ALL ORDER BY tenant, model, class FORMAT JSON"""
_COUNT_SQL = "SELECT count() FROM usage_final WHERE tenant = {tenant:String} FORMAT TSV"


class JobError(RuntimeError):
    """One of the three uses did not work; the message says which and what was answered."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running stack as its users see it: two URLs, host:port, and a tenant with its key."""

    gateway: str
    kafka: str
    sql: str
    tenant: str
    api_key: str
    model: str


async def show(target: Target, console: Console) -> None:
    """Runs all three. Raises JobError for the first that fails."""
    async with httpx.AsyncClient() as client:
        before = await _billed_requests(client, target)
        console.rule("a streamed completion")
        await stream_completion(client, target, console)
        console.rule(f"three records through {topics.batch_requests(target.tenant)}")
        await batch_records(target, console)
        console.rule("the bill")
        await show_bill(client, target, console, before + 1 + len(BATCH_PROMPTS))


async def stream_completion(client: httpx.AsyncClient, target: Target, console: Console) -> None:
    """POST /v1/generate, printed as it comes. Raises JobError."""
    body = {
        "model": target.model,
        "prompt": STREAM_PROMPT,
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
    }
    console.print(STREAM_PROMPT, style="dim", end="", highlight=False)
    done: dict[str, Any] | None = None
    try:
        async with client.stream(
            "POST",
            f"{target.gateway}/v1/generate",
            json=body,
            headers={"Authorization": f"Bearer {target.api_key}"},
            timeout=STREAM_TIMEOUT_S,
        ) as answer:
            if answer.status_code != 200:
                raise JobError(f"the stream was refused with {answer.status_code}: {await answer.aread()!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("type") == "token":
                    console.out(event["text"], end="", highlight=False)
                elif event.get("type") == "done":
                    done = event
                else:
                    raise JobError(f"the stream ended with {event}")
    except httpx.HTTPError as e:
        raise JobError(f"the stream broke: {type(e).__name__} {e}") from e
    if done is None:
        raise JobError("the stream ended without its done event")
    usage = done["usage"]
    console.print(
        f"\n[dim]{usage['input_tokens']} tokens in, {usage['output_tokens']} out, {done['stop_reason']}[/]"
    )


async def batch_records(target: Target, console: Console) -> None:
    """Publishes to the tenant's topic with a plain Kafka client and prints the answers. Raises JobError."""
    batch = secrets.token_hex(4)
    sent = {
        f"{batch}-{i}": {"model": target.model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        for i, prompt in enumerate(BATCH_PROMPTS)
    }
    results = TopicPartition(topics.batch_results(target.tenant), 0)
    consumer = AIOKafkaConsumer(
        **client_settings(target.kafka), isolation_level="read_committed", enable_auto_commit=False
    )
    producer = AIOKafkaProducer(**client_settings(target.kafka), **PRODUCER_SETTINGS)
    answers: dict[str, dict[str, Any]] = {}
    try:
        async with asyncio.timeout(BATCH_TIMEOUT_S):
            await consumer.start()
            await producer.start()
            consumer.assign([results])
            await consumer.seek_to_end(results)
            for custom_id, body in sent.items():
                value = json.dumps({"custom_id": custom_id, **body}).encode()
                await producer.send_and_wait(topics.batch_requests(target.tenant), value)
            while len(answers) < len(sent):
                for record in (await consumer.getmany(timeout_ms=500)).get(results, []):
                    answer = json.loads(record.value)
                    if answer["custom_id"] in sent:
                        answers[answer["custom_id"]] = answer
    except TimeoutError:
        raise JobError(f"{len(answers)} of {len(sent)} batch records were answered in time") from None
    finally:
        await consumer.stop()
        await producer.stop()
    for custom_id, body in sent.items():
        answer = answers[custom_id]
        if answer.get("error"):
            raise JobError(f"batch record {custom_id} was answered with {answer['error']}")
        one_line = answer["text"].replace("\n", " ⏎ ")
        console.print(f"{body['prompt']}[dim] …[/]", end="", highlight=False)
        console.out(one_line, highlight=False)


async def show_bill(client: httpx.AsyncClient, target: Target, console: Console, expected: int) -> None:
    """The billing query, once the tenant has `expected` rows. Raises JobError."""
    deadline, found = time.monotonic() + BILL_TIMEOUT_S, 0
    while time.monotonic() < deadline:
        if (found := await _billed_requests(client, target)) >= expected:
            break
        await asyncio.sleep(0.1)
    if found != expected:
        raise JobError(f"the bill has {found} rows of {target.tenant} where {expected} are due")
    bill = json.loads(await _sql(client, target.sql, BILL_SQL, {}))
    table = Table(*(column["name"] for column in bill["meta"]))
    for row in bill["data"]:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


async def _billed_requests(client: httpx.AsyncClient, target: Target) -> int:
    return int(await _sql(client, target.sql, _COUNT_SQL, {"param_tenant": target.tenant}))


async def _sql(client: httpx.AsyncClient, url: str, query: str, params: dict[str, str]) -> str:
    try:
        answer = await client.post(url, content=query.encode(), params=params, timeout=BILL_TIMEOUT_S)
    except httpx.HTTPError as e:
        raise JobError(f"the SQL endpoint did not answer: {type(e).__name__} {e}") from e
    if answer.status_code != 200:
        raise JobError(f"the SQL endpoint answered {answer.status_code}: {answer.text.strip()}")
    return answer.text
