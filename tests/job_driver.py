"""Files and jobs as a gateway makes them, and what becomes of them."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import obstore
from aiokafka import AIOKafkaConsumer, TopicPartition
from obstore.store import ObjectStore

from schemas import topics
from schemas.api.batches import ENDED
from schemas.clock import epoch_ms
from schemas.codec import decode
from schemas.object_store import open_store
from schemas.records import BatchCancel, BatchJob, BatchState
from schemas.stored_files import (
    Kind,
    ObjectPart,
    StoredFile,
    content,
    new_batch_id,
    new_file_id,
    noted,
    object_parts,
    result_file_id,
)
from schemas.topics import DAY_MS
from tests.ledger_driver import LedgerDriver

GENERATE = {"model": "simulated", "prompt": "hi", "max_tokens": 3}


def make_line(name: str, url: str = "/v1/generate", **fields: Any) -> bytes:
    body = {**GENERATE, **fields} if url == "/v1/generate" else fields
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode() + b"\n"


class JobDriver:
    def __init__(self, bootstrap: str, folder: Path, driver: LedgerDriver) -> None:
        self.states: dict[str, list[BatchState]] = {}
        self._driver, self._folder, self._bootstrap = driver, folder, bootstrap
        self._store: ObjectStore = open_store(str(folder))

    async def start(self) -> None:
        """Reads batch.states as gateways do."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        await consumer.start()
        self._driver.on_exit(consumer.stop)
        shards = self._driver.layout.shards
        consumer.assign([TopicPartition(topics.BATCH_STATES, shard) for shard in range(shards)])
        self._consumer: Any = consumer

    async def put_file(self, tenant: str, lines: Sequence[bytes]) -> str:
        data, now_ms = b"".join(lines), epoch_ms()
        file_id = new_file_id(now_ms)
        name = content(tenant, file_id)
        await obstore.put_async(self._store, name, data)
        file = StoredFile(
            id=file_id,
            tenant=tenant,
            filename="in.jsonl",
            purpose="batch",
            bytes=len(data),
            created_at=now_ms,
            expires_at=now_ms + DAY_MS,
            parts=[ObjectPart(name, len(data))],
            lines=len(lines),
        )
        await obstore.put_async(self._store, noted(tenant, file_id), msgspec.json.encode(file))
        return file_id

    async def start_job(self, tenant: str, file_id: str, **fields: Any) -> str:
        now_ms = epoch_ms()
        asked: dict[str, Any] = {
            "form": "openai",
            "endpoint": "/v1/generate",
            "model": None,
            "completion_window_ms": DAY_MS,
            **fields,
        }
        job = BatchJob(
            batch_id=new_batch_id(now_ms), tenant=tenant, input_file_id=file_id, created_at=now_ms, **asked
        )
        await self._append(tenant, job.batch_id, job)
        return job.batch_id

    async def run_job(self, tenant: str, lines: Sequence[bytes], **fields: Any) -> str:
        return await self.start_job(tenant, await self.put_file(tenant, lines), **fields)

    async def cancel(self, tenant: str, batch_id: str) -> None:
        await self._append(tenant, f"{batch_id}/cancel", BatchCancel(batch_id, tenant, epoch_ms()))

    async def _append(self, tenant: str, key: str, record: Any) -> None:
        await self._driver.send(
            topics.BATCH_JOBS,
            topics.tenant_shard(tenant, self._driver.layout.shards),
            record,
            key=key.encode(),
        )

    async def wait_for(
        self, batch_id: str, *statuses: str, seconds: float = 30.0, completed: int = 0
    ) -> BatchState:
        """Its newest state, once that has one of these statuses and so many completed items."""
        async with asyncio.timeout(seconds):
            while True:
                known = self.states.get(batch_id)
                if known and known[-1].status in (statuses or ENDED) and known[-1].completed >= completed:
                    return known[-1]
                for records in (await self._consumer.getmany(timeout_ms=200)).values():
                    for record in records:
                        state = decode(record.value)
                        assert isinstance(state, BatchState)
                        self.states.setdefault(state.batch_id, []).append(state)

    def lines(self, state: BatchState, kind: Kind) -> list[Any]:
        """What a reader of the file sees at this state."""
        parts = state.output if kind == "output" else state.error_output
        found = b""
        for part in object_parts(state.tenant, state.batch_id, kind, parts):
            found += (self._folder / part.name).read_bytes()[: part.size]
        assert not found or found.endswith(b"\n")
        return [json.loads(line) for line in found.splitlines()]

    def file(self, state: BatchState, kind: Kind) -> StoredFile | None:
        """The output or error file as it is noted."""
        path = self._folder / noted(state.tenant, result_file_id(state.batch_id, kind))
        return msgspec.json.decode(path.read_bytes(), type=StoredFile) if path.exists() else None

    def delete_input(self, tenant: str, file_id: str) -> None:
        (self._folder / noted(tenant, file_id)).unlink()
        (self._folder / content(tenant, file_id)).unlink()
