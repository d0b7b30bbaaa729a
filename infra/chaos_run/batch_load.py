"""Batch work on a stack that is being hurt: files of lines over HTTP, and records on a topic."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

import httpx
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from infra.chaos_run.chaos_stack import ChaosStack
from infra.chaos_run.records import ItemRecord
from schemas import topics
from schemas.api.batches import ENDED
from schemas.kafka_login import client_settings

_TENANT = "batch"
_AGAIN_S = 0.3
_CLOSE_S = 5.0
Report = Callable[[str], None]
T = TypeVar("T")


class BatchLoad:
    """`files`: the items of each batch by its id; `records`: those published on the topic."""

    def __init__(
        self,
        chaos: ChaosStack,
        rng: random.Random,
        tokens: tuple[int, int],
        lines: int,
        between_records_s: float,
        report: Report,
    ) -> None:
        """`tokens`: from, to so many of each item; `lines` of a file."""
        self._chaos, self._rng, self._tokens, self._lines = chaos, rng, tokens, lines
        self._between_records_s = between_records_s
        self._report = report
        self._last = "no refusal was seen"
        self._numbers = count()
        self._stopping = False
        self._running: list[asyncio.Task[None]] = []
        self._results_from = 0
        self.files: dict[str, list[ItemRecord]] = {}
        self.records: dict[str, ItemRecord] = {}
        self.findings: list[str] = []
        self._producer: AIOKafkaProducer | None = None

    def start(self) -> None:
        self._stopping = False
        self._running = [asyncio.create_task(self._send_files()), asyncio.create_task(self._publish())]

    async def stop(self, timeout_s: float) -> list[str]:
        """Returns when all that was asked for is answered, or `timeout_s` is over: what is wrong then."""
        self._stopping = True
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*self._running)
                await self._read_results()
        except TimeoutError:
            lines = [item for items in self.files.values() for item in items]
            self.findings.append(
                f"batch work hung for {timeout_s:g} s: {_unanswered(self.records.values())} records and "
                f"{_unanswered(lines)} lines without an answer; last refusal: {self._last}"
            )
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._close_producer()
        for item in (*self.records.values(), *(i for items in self.files.values() for i in items)):
            self._check(item)
        found, self.findings = self.findings, []
        return found

    def clear(self) -> None:
        self.files.clear()
        self.records.clear()

    def _check(self, item: ItemRecord) -> None:
        if len(item.answers) > item.published:
            self.findings.append(f"item {item.custom_id} was answered {len(item.answers)} times")
        for answer in item.answers:
            body = answer.get("response", {}).get("body") if "response" in answer else answer
            usage = (body or {}).get("usage") or {}
            tokens = usage.get("completion_tokens", usage.get("output_tokens"))
            if answer.get("error") is not None or tokens != item.max_tokens:
                self.findings.append(f"item {item.custom_id} was answered {json.dumps(answer)[:300]}")

    # --- files

    async def _send_files(self) -> None:
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._chaos.keys[_TENANT]}"}, timeout=5.0
        ) as client:
            while not self._stopping:
                await self._one_file(client)

    async def _one_file(self, client: httpx.AsyncClient) -> None:
        tokens = self._rng.randint(*self._tokens)
        items = [ItemRecord(f"line-{next(self._numbers)}", tokens, published=1) for _ in range(self._lines)]
        text = "\n".join(json.dumps(self._line(item)) for item in items)
        # An upload or a batch whose answer is lost may be there: then it runs too, and nobody asks for it.
        file: dict[str, Any] = await self._until_answered(
            lambda url: client.post(
                f"{url}/v1/files", files={"file": ("lines.jsonl", text)}, data={"purpose": "batch"}
            )
        )
        asked = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch: dict[str, Any] = await self._until_answered(
            lambda url: client.post(f"{url}/v1/batches", json=asked)
        )
        self.files[batch["id"]] = items
        while batch["status"] not in ENDED:
            await asyncio.sleep(_AGAIN_S)
            path = f"/v1/batches/{batch['id']}"
            batch = await self._until_answered(lambda url, path=path: client.get(url + path))  # type: ignore[misc]
        if batch["status"] != "completed" or batch["error_file_id"]:
            self.findings.append(f"batch {batch['id']} ended {batch['status']}: {json.dumps(batch)[:400]}")
        by_id = {item.custom_id: item for item in items}
        path = f"/v1/files/{batch['output_file_id']}/content"
        for answer in await self._until_answered(lambda url: client.get(url + path), _lines):
            by_id[answer["custom_id"]].answers.append(answer)
        if missing := [item.custom_id for item in items if not item.answers]:
            self.findings.append(f"batch {batch['id']} has no lines for {missing}")

    def _line(self, item: ItemRecord) -> dict[str, Any]:
        body = {
            "model": self._chaos.model,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "messages": [{"role": "user", "content": f"item {item.custom_id}"}],
        }
        return {"custom_id": item.custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}

    async def _until_answered(
        self,
        ask: Callable[[str], Awaitable[httpx.Response]],
        read: Callable[[httpx.Response], T] = lambda answer: answer.json(),
    ) -> T:
        """What a gateway answers at last; `stop` sets the deadline. Raises RuntimeError for a refusal."""
        while True:
            for url in self._chaos.gateway_urls():
                with suppress(httpx.HTTPError):
                    answer = await ask(url)
                    if answer.status_code == 200:
                        return read(answer)
                    self._last = f"{answer.request.method} {url}: {answer.status_code} {answer.text[:200]}"
                    if answer.status_code not in (404, 408, 429, 503):
                        raise RuntimeError(f"{answer.request.url}: {answer.status_code} {answer.text[:300]}")
            await asyncio.sleep(_AGAIN_S)

    # --- the topic

    async def _publish(self) -> None:
        while not self._stopping:
            item = ItemRecord(f"record-{next(self._numbers)}", self._rng.randint(*self._tokens))
            self.records[item.custom_id] = item
            await self._publish_one(item)

    async def _publish_one(self, item: ItemRecord) -> None:
        """Publishes it, and what comes behind it until Kafka fails: a producer that lost an ack may be of no
        use any more. Then it is published again: the same custom_id is the same request."""
        value = {
            "custom_id": item.custom_id,
            "model": self._chaos.model,
            "prompt": item.custom_id,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        topic, content = topics.batch_requests(_TENANT), json.dumps(value).encode()
        while True:
            if self._producer is None:
                await self._open_producer()
                continue
            item.published += 1
            try:
                await self._producer.send_and_wait(topic, content)
            except (KafkaError, TimeoutError) as error:
                self._report(f"a record was not acked, and is published again: {error!r}")
                await self._close_producer()
                await asyncio.sleep(_AGAIN_S)
            else:
                await asyncio.sleep(self._between_records_s)
                return

    async def _open_producer(self) -> None:
        producer = AIOKafkaProducer(
            **client_settings(self._chaos.stack.bootstrap_servers), enable_idempotence=True
        )
        try:
            await producer.start()
        except (KafkaError, TimeoutError):
            await asyncio.sleep(_AGAIN_S)
        else:
            self._producer = producer

    async def _close_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            # Its stop flushes, which may never end.
            with suppress(KafkaError, TimeoutError):
                await asyncio.wait_for(producer.stop(), _CLOSE_S)

    async def _read_results(self) -> None:
        """Until every record has an answer, and the topic is read to its end."""
        partition = TopicPartition(topics.batch_results(_TENANT), 0)
        async with AIOKafkaConsumer(
            **client_settings(self._chaos.stack.bootstrap_servers),
            isolation_level="read_committed",
            auto_offset_reset="earliest",
        ) as consumer:
            consumer.assign([partition])
            consumer.seek(partition, self._results_from)
            while True:
                records = (await consumer.getmany(timeout_ms=1_000)).get(partition, [])
                for record in records:
                    answer = json.loads(record.value)
                    self.records[answer["custom_id"]].answers.append(answer)
                    self._results_from = record.offset + 1
                if not records and all(item.answers for item in self.records.values()):
                    return


def _unanswered(items: Iterable[ItemRecord]) -> int:
    return sum(not item.answers for item in items)


def _lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]
