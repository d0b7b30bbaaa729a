"""Plays admission and owner for two workers with roles: dispatches requests, and waits for first tokens."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas import topics
from schemas.clock import epoch_ms
from schemas.codec import decode, encode
from schemas.fleet import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from schemas.kafka_login import client_settings
from schemas.records import Completion, Dispatch, Heartbeat, InferenceRequest, Pairing, SamplingParams, Tokens

_REPLY = topics.partition(0, 0)
_TIMEOUT_S = 120.0
_RESERVE_MS, _LEASE_MS = 5_000, 60_000


@dataclass(frozen=True, slots=True)
class Served:
    """Milliseconds from the dispatch to the first token and to the end, and the slot that served it."""

    ttft_ms: float
    whole_ms: float
    slot: int
    token_ids: list[int]


class HandoffClient:
    """One request at a time."""

    def __init__(self, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer, model: str) -> None:
        self._producer = producer
        self._consumer = consumer
        self._model = model
        self._epochs: dict[int, int] = {}

    async def hear(self, slots: Sequence[int]) -> None:
        """Returns when all of them heartbeat."""
        async with asyncio.timeout(_TIMEOUT_S):
            while not all(slot in self._epochs for slot in slots):
                await self._read()

    async def serve(
        self, prompt: Sequence[int], max_tokens: int, slot: int, decode_slot: int | None = None
    ) -> Served:
        """Sends it to `slot`, from which it goes on at `decode_slot`, if one is named."""
        sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        request = InferenceRequest(
            os.urandom(16), 1, "bench", 0, self._model, list(prompt), [], sampling, _REPLY, 1, epoch_ms(), 0
        )
        pairing = None
        if decode_slot is not None:
            decode_epoch = self._epochs[decode_slot]
            pairing = Pairing(os.urandom(16), decode_slot, decode_epoch, _RESERVE_MS, _LEASE_MS)
        record = Dispatch(slot, self._epochs[slot], max_tokens, request, pairing)
        began = time.perf_counter()
        partition = topics.partition(slot, 0)
        await self._producer.send_and_wait(topics.PREFILL, encode(record), partition=partition)
        first, token_ids = 0.0, list[int]()
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                for value in await self._read():
                    if isinstance(value, Tokens):
                        for chunk in value.chunks:
                            if chunk.request_id == request.request_id and chunk.token_ids:
                                first = first or time.perf_counter()
                                token_ids += chunk.token_ids
                    elif isinstance(value, Completion) and value.request_id == request.request_id:
                        if value.finish_reason != "length":
                            raise RuntimeError(f"it ended with {value.finish_reason}: {value.message}")
                        whole_ms = (time.perf_counter() - began) * 1000
                        return Served((first - began) * 1000, whole_ms, value.slot, token_ids)

    async def _read(self) -> list[object]:
        values: list[object] = []
        for records in (await self._consumer.getmany(timeout_ms=100)).values():
            for record in records:
                value = decode(record.value)
                if isinstance(value, Heartbeat):
                    if value.role == "worker":
                        self._epochs[value.slot] = value.epoch
                else:
                    values.append(value)
        return values


@asynccontextmanager
async def handoff_client(kafka: str, model: str) -> AsyncIterator[HandoffClient]:
    producer = AIOKafkaProducer(**client_settings(kafka), **PRODUCER_SETTINGS)
    consumer = AIOKafkaConsumer(**client_settings(kafka), **CONSUMER_SETTINGS)
    try:
        await producer.start()
        await consumer.start()
        read = [TopicPartition(topics.TOKENS, _REPLY), TopicPartition(topics.HEARTBEATS, 0)]
        places = await consumer.end_offsets(read)
        # Nothing may run between these lines: a partition without a place is an error to the consumer.
        consumer.assign(read)
        for partition, offset in places.items():
            consumer.seek(partition, offset)
        yield HandoffClient(producer, consumer, model)
    finally:
        await producer.stop()
        await consumer.stop()
