"""Gateways die, nobody starts them again and no client comes back: all ends in time, as things are set."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from schemas import topics
from schemas.records import Heartbeat, InferenceRequest, Tokens, Usage
from schemas.stream_state import ReplyRecord, Run, StreamState
from schemas.usage_rank import usage_rank
from tests.e2e.conftest import MakeStack, RunningStack
from tests.log_reader import LogReader, Seen

NUM_RUNNING = 16
ENDS_MS = 60_000
READ = (topics.REQUESTS, topics.TOKENS, topics.USAGE, topics.HEARTBEATS)


@dataclass(eq=False)
class Asked:
    """A request as the log tells of it; when its end and the row that counts were written."""

    state: StreamState
    slot: int = -1
    ended_at: int | None = None
    usage: Usage | None = None
    billed_at: int = 0

    def apply(self, record: ReplyRecord, timestamp_ms: int) -> None:
        self.state.apply(record)
        if self.ended_at is None and self.state.end is not None:
            self.ended_at = timestamp_ms

    def bill(self, usage: Usage, timestamp_ms: int) -> None:
        if self.usage is None or usage_rank(usage) > usage_rank(self.usage):
            self.usage, self.billed_at = usage, timestamp_ms


class History:
    """What the log says, as far as it was read."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._num_read = 0
        self._found: dict[bytes, Asked] = {}
        self.asked: list[Asked] = []  # in the order of their acceptance
        self.heard: dict[int, int] = {}

    async def wait_for(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        def look() -> bool:
            for seen in self._log.seen[self._num_read :]:
                self._take(seen)
            self._num_read = len(self._log.seen)
            return condition()

        await self._log.wait_for(look, timeout)

    def _take(self, seen: Seen) -> None:
        record = seen.value
        match record:
            case Heartbeat() if record.role == "gateway":
                self.heard[record.slot] = seen.timestamp
            case InferenceRequest() if (found := self._of(record.request_id)) not in self.asked:
                found.slot = topics.shard_of(record.reply_partition)
                self.asked.append(found)
            case Tokens():
                for chunk in record.chunks:
                    self._of(chunk.request_id).state.apply_chunk(Run(record.slot, record.epoch), chunk)
            case Usage():
                self._of(record.request_id).bill(record, seen.timestamp)
            case _ if isinstance(record, ReplyRecord) and record.request_id is not None:
                self._of(record.request_id).apply(record, seen.timestamp)

    def _of(self, request_id: bytes) -> Asked:
        return self._found.setdefault(request_id, Asked(StreamState(request_id)))


async def ask(running: RunningStack, slot: int, has_begun: asyncio.Event) -> None:
    """A client that reads on until its gateway is gone, and does not come back."""
    headers = {"authorization": f"Bearer {running.api_key}"}
    body = {"model": running.model, "prompt": "hi", "max_tokens": 15_000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(
            base_url=running.stack.url(f"gateway-{slot}"), headers=headers, timeout=60
        ) as client,
        client.stream("POST", "/v1/generate", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if "token" in line:
                has_begun.set()


async def all_broken(clients: Sequence[asyncio.Task[None]]) -> None:
    ends = await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), 20)
    assert all(isinstance(end, httpx.TransportError) for end in ends)


async def test_what_dead_gateways_owned_ends_and_is_billed_within_a_minute(make_stack: MakeStack) -> None:
    worker = {"HEADRACE_MAX_NUM_SEQS": str(NUM_RUNNING)}
    running = await asyncio.to_thread(make_stack, gateways=3, step_ms=20.0, settings={"worker": worker})
    stack = running.stack
    async with LogReader.open(stack.bootstrap_servers, stack.config.layout, READ) as log:
        history = History(log)
        asked = history.asked
        # 1. The first runs 16 streams, and one waits behind them.
        begun = [asyncio.Event() for _ in range(NUM_RUNNING)]
        clients = [asyncio.create_task(ask(running, 0, event)) for event in begun]
        async with asyncio.timeout(30):
            for event in begun:
                await event.wait()
        waiting = asyncio.Event()
        clients.append(asyncio.create_task(ask(running, 0, waiting)))
        await history.wait_for(lambda: len(asked) == NUM_RUNNING + 1)
        queued = asked[-1]
        await history.wait_for(lambda: queued.state.requests_offset is not None)
        stack.kill("gateway-0")
        await all_broken(clients)
        # 2. The second has one that admission never read: both die, and admission comes back.
        stack.kill("admission-0")
        clients = [asyncio.create_task(ask(running, 1, waiting))]
        await history.wait_for(lambda: len(asked) == NUM_RUNNING + 2)
        unread = asked[-1]
        stack.kill("gateway-1")
        await all_broken(clients)
        await asyncio.to_thread(running.call, stack.restart("admission-0"))
        # 3. All end, with a bill of what was told of them.
        await history.wait_for(
            lambda: all(each.ended_at and each.usage is not None for each in asked), 2 * ENDS_MS / 1000
        )
        await log.read_for(2.0)
        await history.wait_for(lambda: True)
    ends = []
    for each in asked:
        usage, state = each.usage, each.state
        assert usage is not None
        assert each.ended_at is not None
        assert (usage.finish_reason, usage.output_tokens) == ("cancelled", len(state.token_ids))
        # A worker's own row is the last word of what it ran, or an owner has sealed it.
        assert usage.sealed or (state.run is not None and not state.strays)
        assert bool(state.token_ids) == (each not in (queued, unread))
        ends.append(max(each.ended_at, each.billed_at) - history.heard[each.slot])
    print(f"ended and billed {min(ends)} to {max(ends)} ms after their gateways were last heard")
    assert max(ends) <= ENDS_MS
    assert not waiting.is_set()
