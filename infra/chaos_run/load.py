"""Mixed load on a stack that is being hurt: clients that come back, leave, read slowly or read together.

Each client goes on asking until it is told to stop, and writes down what it was shown.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from itertools import count

from infra.benchmarks.returning_client import Delivery, LeftError, RefusedError, deliver
from infra.chaos_run.chaos_stack import ChaosStack
from infra.chaos_run.records import ClientRecord, End

# Some begin alike, for the prefix caches.
PROMPTS = [f"{'What all have in common. ' * 4 if n % 3 else ''}chaos {n}" for n in range(8)]
# (kind, of ten clients so many)
_KINDS = {"stream": 3, "free": 2, "leaves": 1, "resumes": 1, "two_readers": 1, "slow": 1, "keyed": 1}
# Without a head of an answer, and without a byte of a stream, for so long a client goes to the next gateway.
_PATIENCE_S = (20.0, 2.0)
_AFTER_REFUSAL_S = 0.2
_DETACH_S = 60.0


class Load:
    """`clients` ask one request after another. `records` grows; who looks takes what it has seen out."""

    def __init__(
        self,
        chaos: ChaosStack,
        rng: random.Random,
        *,
        clients: int,
        tokens: tuple[int, int],
        long_prompts: bool = False,
    ) -> None:
        """`tokens`: from, to so many are asked for. `long_prompts`: most are, and begin like no other, so
        that they are computed elsewhere than they are decoded."""
        self._chaos, self._rng, self._clients, self._tokens = chaos, rng, clients, tokens
        self._long_prompts = long_prompts
        self._numbers = count()
        self._stopping = False
        self._running: list[asyncio.Task[None]] = []
        self.records: list[ClientRecord] = []

    def start(self) -> None:
        self._stopping = False
        kinds = [kind for kind, times in _KINDS.items() for _ in range(times)]
        self._running = [
            asyncio.create_task(self._client(kinds[n % len(kinds)], n)) for n in range(self._clients)
        ]

    async def stop(self, timeout_s: float) -> list[str]:
        """Returns when the last answers have come; what hangs longer is told and given up."""
        self._stopping = True
        _, hung = await asyncio.wait(self._running, timeout=timeout_s)
        found = [
            f"a client hung for {timeout_s:g} s: {r.as_json()}" for r in self.records if r.end is End.OPEN
        ]
        for task in hung:
            task.cancel()
        for result in await asyncio.gather(*self._running, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return found

    async def _client(self, kind: str, number: int) -> None:
        while not self._stopping:
            record = self._new_record(kind)
            urls = self._chaos.gateway_urls()
            if number % 2:
                urls.reverse()
            await self._ask(record, urls)
            if record.end in (End.REFUSED, End.UNANSWERED):
                await asyncio.sleep(_AFTER_REFUSAL_S)

    def _new_record(self, kind: str) -> ClientRecord:
        number = next(self._numbers)
        prompt = PROMPTS[number % len(PROMPTS)]
        if self._long_prompts and number % 4:
            prompt = f"{number} is read by nobody else. " * self._rng.randint(12, 50)
        tenant = "free" if kind == "free" else "interactive"
        tokens = self._rng.randint(*self._tokens)
        record = ClientRecord(kind, tenant, prompt, tokens, time.perf_counter())
        self.records.append(record)
        return record

    async def _ask(self, record: ClientRecord, urls: list[str]) -> None:
        key = f"key-{next(self._numbers)}-{record.began:.6f}" if record.kind == "keyed" else ""
        delivery = record.delivery
        second: asyncio.Task[None] | None = None

        async def on_events() -> None:
            nonlocal second
            if record.kind == "two_readers" and second is None:
                second = asyncio.create_task(self._read_too(record, urls[::-1]))
            await act()

        act = self._behaviour(record)
        await self._deliver(record, urls, key, on_events)
        if second is not None:
            await second
        assert record.end is not End.OPEN, delivery

    async def _read_too(self, record: ClientRecord, urls: list[str]) -> None:
        """A second client of the same stream, from its beginning."""
        first = record.delivery
        delivery = Delivery(request_id=first.request_id, stream_id=first.stream_id)
        too = ClientRecord("reads_too", record.tenant, record.prompt, record.max_tokens, time.perf_counter())
        too.delivery = delivery
        self.records.append(too)
        await self._deliver(too, urls, "", None)

    async def _deliver(
        self,
        record: ClientRecord,
        urls: list[str],
        key: str,
        on_events: Callable[[], Awaitable[None]] | None,
    ) -> None:
        delivery = record.delivery
        body: dict[str, object] = {
            "model": self._chaos.model,
            "prompt": record.prompt,
            "max_tokens": record.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if record.tenant == "free":
            body["priority"] = "free"
        try:
            await deliver(
                urls,
                self._chaos.keys[record.tenant],
                body,
                delivery,
                detach_s=0.0 if record.kind == "leaves" else _DETACH_S,
                key=key,
                patience_s=_PATIENCE_S,
                on_events=on_events,
            )
        except LeftError:
            record.end = End.LEFT
        except RefusedError as error:
            record.status, record.detail = error.status, str(error)[:300]
            if delivery.stream_id:
                record.end = End.FAILED
            else:
                record.end = End.REFUSED if error.status in (429, 503) else End.UNANSWERED
                if error.status not in (0, 429, 503):
                    record.end = End.FAILED
        except TimeoutError:
            record.end, record.detail = End.FAILED, "no end within two minutes"
        else:
            record.status = 200
            record.end = End.DONE if delivery.done is not None else End.FAILED
            if record.kind == "leaves" and _was_cancelled(delivery):
                # A connection of its own that broke ends its request: nobody is expected to come back.
                record.end, delivery.done = End.LEFT, None
            record.detail = "" if delivery.error is None else str(delivery.error)

    def _behaviour(self, record: ClientRecord) -> Callable[[], Awaitable[None]]:
        """What a client of this kind does as events come."""
        delivery = record.delivery
        turn = self._rng.randint(1, max(1, record.max_tokens - 2))
        broke = False

        async def nothing() -> None:
            pass

        async def leaves() -> None:
            if len(delivery.text) >= turn:
                raise LeftError

        async def resumes() -> None:
            nonlocal broke
            if len(delivery.text) >= turn and not broke:
                broke = True
                raise ConnectionResetError("of its own will")

        async def slow() -> None:
            await asyncio.sleep(0.1)

        return {"leaves": leaves, "resumes": resumes, "slow": slow}.get(record.kind, nothing)


def _was_cancelled(delivery: Delivery) -> bool:
    done, error = delivery.done or {}, delivery.error or {}
    return done.get("finish_reason") == "cancelled" or error.get("code") == "cancelled"
