"""What records of a tenant were answered with, as batch.results holds it: a producer's own retry is told
again, also after a restart and after hours, and nothing is run for it."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from schemas import topics
from schemas.headers import answered_request
from streams.consumer import Consumer, assign_at

log = logging.getLogger(__name__)

# Of each tenant. 129 bytes an answer: 6.5 MB for one that has so many, and 0.35 s of CPU to read them back.
REMEMBERED = 50_000
# Requests wait meanwhile: where answers are so large that this does not suffice, the latest are known.
_LOAD_S = 20.0
_CHUNK = 4_096  # offsets
RESULTS_PARTITION = 0  # a tenant's topics have one partition
_POLL_MS = 500
_TIMEOUT_S = 30.0


class AnswerPlaces:
    """Where the latest `limit` answers of a tenant lie: offsets by request. Pure.

    By 64 bits of the request's id; who reads an answer looks whose it is.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._offsets: dict[int, int] = {}
        self._order: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._offsets)

    def put(self, request_id: bytes, offset: int) -> None:
        """Of one that was answered again, the first answer counts."""
        key = _key(request_id)
        if key in self._offsets:
            return
        self._offsets[key] = offset
        self._order.append(key)
        if len(self._order) > self._limit:
            del self._offsets[self._order.popleft()]

    def get(self, request_id: bytes) -> int | None:
        return self._offsets.get(_key(request_id))


class EarlierAnswers:
    """`consumer` is started, reads committed records, and is nobody else's. `find` is for one task alone."""

    def __init__(
        self, consumer: Consumer, partition: Callable[[str, int], Any], limit: int = REMEMBERED
    ) -> None:
        self._consumer, self._partition, self._limit = consumer, partition, limit
        self._places: dict[str, AnswerPlaces] = {}
        self._while_loading: dict[str, list[tuple[bytes, int]]] = {}

    def put(self, tenant: str, request_id: bytes, offset: int) -> None:
        """The answer was committed there."""
        if tenant in self._places:
            self._places[tenant].put(request_id, offset)
        elif tenant in self._while_loading:
            self._while_loading[tenant].append((request_id, offset))

    async def find(self, tenant: str, request_id: bytes) -> bytes | None:
        """What the request was answered with; None where it was not, or that is not remembered.

        Raises TimeoutError, KafkaError.
        """
        tp = self._partition(topics.batch_results(tenant), RESULTS_PARTITION)
        if tenant not in self._places:
            await self._load(tenant, tp)
        offset = self._places[tenant].get(request_id)
        if offset is None:
            return None
        async with asyncio.timeout(_TIMEOUT_S):
            if offset < (await self._consumer.beginning_offsets([tp]))[tp]:
                return None  # aged out
            assign_at(self._consumer, {tp: offset})
            while not (found := (await self._consumer.getmany(timeout_ms=_POLL_MS, max_records=1)).get(tp)):
                pass
        value: bytes = found[0].value
        return value if answered_request(found[0].headers) == request_id else None

    async def _load(self, tenant: str, tp: Any) -> None:
        # 1. What is committed from here on is told; what was before lies below the end.
        told = self._while_loading[tenant] = []
        async with asyncio.timeout(_TIMEOUT_S):
            end = (await self._consumer.end_offsets([tp]))[tp]
            begin = (await self._consumer.beginning_offsets([tp]))[tp]
        # 2. Back from there, until there are enough.
        found: list[tuple[bytes, int]] = []
        try:
            async with asyncio.timeout(_LOAD_S):
                while begin < end and len(found) < self._limit:
                    at = max(begin, end - _CHUNK)
                    found += reversed(await self._read(tp, at, end))
                    end = at
        except TimeoutError:
            log.warning("not all answers were read back in time", extra={"tenant": tenant, "from": end})
        # 3. The oldest first, as they would have been told.
        places = AnswerPlaces(self._limit)
        for request_id, offset in [*reversed(found), *told]:
            places.put(request_id, offset)
        self._places[tenant] = places
        del self._while_loading[tenant]
        if places:
            log.info("answers read back", extra={"tenant": tenant, "answers": len(places)})

    async def _read(self, tp: Any, at: int, end: int) -> list[tuple[bytes, int]]:
        """The requests answered from `at` to before `end`, and where."""
        found = []
        assign_at(self._consumer, {tp: at})
        while at < end:
            batch = await self._consumer.getmany(timeout_ms=_POLL_MS)
            for record in batch.get(tp, []):
                request_id = answered_request(record.headers)
                if record.offset < end and request_id is not None:
                    found.append((request_id, record.offset))
            at = await self._consumer.position(tp)
        return found


def _key(request_id: bytes) -> int:
    return int.from_bytes(request_id[:8], "big")
