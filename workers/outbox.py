"""What leaves a worker: tokens, usage, completions, in the order that owners and bills rely on."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable

from aiokafka import AIOKafkaProducer

from schemas import topics
from schemas.clock import epoch_ms
from schemas.codec import encode
from schemas.headers import Headers, ReplyTo, reply_headers
from schemas.records import Completion, Tokens, Usage
from schemas.token_records import TokenChunk
from workers.lane import Lane
from workers.live_requests import End, LiveRequest


class Outbox:
    """Bounded by standing still: a reply partition with `max_records` unacked records is reported blocked
    until half of them are acked, and the engine does not schedule its sequences.

    `on_blocked` gets the set of blocked partitions whenever it changes. `on_fatal` gets the error after
    which records may be missing: the run must end.
    """

    def __init__(
        self,
        slot: int,
        epoch: int,
        model: str,
        shards: int,
        tokens_producer: AIOKafkaProducer,
        usage_producer: AIOKafkaProducer,
        *,
        max_records: int,
        on_blocked: Callable[[frozenset[int]], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._slot = slot
        self._epoch = epoch
        self._model = model
        self._shards = shards
        self._tokens_producer = tokens_producer
        self._usage_producer = usage_producer
        self._max_records = max_records
        self._on_blocked = on_blocked
        self._on_fatal = on_fatal
        self._blocked: frozenset[int] = frozenset()
        self._token_lanes: dict[int, Lane] = {}
        self._usage_lanes: dict[int, Lane] = {}
        self._ends: set[asyncio.Task[None]] = set()

    def send_tokens(self, partition: int, chunks: list[TokenChunk]) -> None:
        """Queues one record for all that one step gave to one reply partition."""
        self._token_lane(partition).put(encode(Tokens.of(self._slot, self._epoch, chunks)))

    def send_signs_of_life(self, requests: Iterable[LiveRequest]) -> None:
        """Names live requests without tokens. A partition that has records to come needs no sign."""
        by_partition: dict[int, list[TokenChunk]] = {}
        for live in requests:
            partition = live.request.reply_partition
            if self._token_lane(partition).num_unacked == 0:
                by_partition.setdefault(partition, []).append(_sign(live))
        for partition, chunks in by_partition.items():
            self.send_tokens(partition, chunks)

    def send_taken(self, live: LiveRequest) -> None:
        """Says at once that this run has the request: until then its owner counts on who has the prompt."""
        self.send_tokens(live.request.reply_partition, [_sign(live)])

    def end(self, live: LiveRequest, end: End) -> None:
        """Tells usage and end of a request, after all tokens of it that were queued before."""
        self._start(self._end(live, end, ended_at=epoch_ms()))

    def refuse(self, to: ReplyTo, message: str) -> None:
        """Ends a request of which nothing is known but whose it is: nothing ran, nothing is billed."""
        completion = Completion(
            request_id=to.request_id,
            attempt=to.attempt,
            slot=self._slot,
            epoch=self._epoch,
            input_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            finish_reason="error",
            message=message,
        )
        self._token_lane(to.reply_partition).put(encode(completion), reply_headers(to))

    @property
    def is_empty(self) -> bool:
        return not self._ends and all(lane.num_unacked == 0 for lane in self._lanes())

    def age(self, now: float) -> float:
        """Seconds that the oldest unacked record waits."""
        return max((lane.age(now) for lane in self._lanes()), default=0.0)

    def halt(self) -> None:
        """Hands nothing more to Kafka, and drops what was not handed over yet; see `settle`, and `close`."""
        for task in self._ends:
            task.cancel()
        for lane in self._lanes():
            lane.halt()

    async def settle(self, timeout_s: float) -> None:
        """Returns once what Kafka's clients have taken is acked. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            for producer in (self._tokens_producer, self._usage_producer):
                await producer.flush()

    async def close(self) -> None:
        """Stops sending. What is unacked may or may not arrive."""
        for task in self._ends:
            task.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)
        for lane in self._lanes():
            await lane.close()

    async def _end(self, live: LiveRequest, end: End, ended_at: int) -> None:
        request, headers = live.request, reply_headers(live.reply_to, live.traceparent)
        num_output_tokens = live.num_output_tokens
        tokens = self._token_lane(request.reply_partition)
        # 1. Tokens acked: all that is billed below lies in the log.
        if tokens.last_acked is not None:
            await tokens.last_acked
        # 2. Usage acked: whoever sees the end finds the bill complete. A worker that dies before this
        #    leaves no row, and the owner writes a sealed one.
        await self._send_usage(
            Usage(
                request_id=request.request_id,
                attempt=request.attempt,
                sealed=False,
                tenant=live.tenant,
                priority=request.priority,
                model=self._model,
                input_tokens=len(request.prompt_token_ids),
                cached_tokens=request.num_cached_tokens,
                output_tokens=num_output_tokens,
                finish_reason=end.reason,
                accepted_at=live.accepted_at,
                ended_at=ended_at,
                slot=self._slot,
                epoch=self._epoch,
                first_token_ms=live.first_token_ms,
                recomputed_tokens=request.num_recomputed_tokens,
            ),
            headers,
        )
        # 3. Completion. A worker that dies before this is a lost one: the owner retries, and the row of the
        #    higher attempt replaces ours.
        completion = Completion(
            request_id=request.request_id,
            attempt=request.attempt,
            slot=self._slot,
            epoch=self._epoch,
            input_tokens=len(request.prompt_token_ids),
            cached_tokens=request.num_cached_tokens,
            output_tokens=num_output_tokens,
            finish_reason=end.reason,
            text_length=end.text_length,
            message=end.message or None,
        )
        tokens.put(encode(completion), headers)

    def _send_usage(self, usage: Usage, headers: Headers) -> asyncio.Future[None]:
        partition = topics.tenant_partition(usage.tenant, usage.priority, self._shards)
        lane = self._usage_lanes.get(partition)
        if lane is None:
            lane = Lane(self._usage_producer, topics.USAGE, partition, lambda lane: None, self._on_fatal)
            self._usage_lanes[partition] = lane
        return lane.put(encode(usage), headers)

    def _token_lane(self, partition: int) -> Lane:
        lane = self._token_lanes.get(partition)
        if lane is None:
            lane = Lane(self._tokens_producer, topics.TOKENS, partition, self._note_change, self._on_fatal)
            self._token_lanes[partition] = lane
        return lane

    def _note_change(self, lane: Lane) -> None:
        blocked = lane.partition in self._blocked
        if not blocked and lane.num_unacked >= self._max_records:
            self._blocked |= {lane.partition}
        elif blocked and lane.num_unacked <= self._max_records // 2:
            self._blocked -= {lane.partition}
        else:
            return
        self._on_blocked(self._blocked)

    def _lanes(self) -> list[Lane]:
        return [*self._token_lanes.values(), *self._usage_lanes.values()]

    def _start(self, ending: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(ending)
        self._ends.add(task)
        task.add_done_callback(self._on_ended)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        self._ends.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._on_fatal(error)


def _sign(live: LiveRequest) -> TokenChunk:
    return TokenChunk(live.request.request_id, live.request.attempt, live.num_output_tokens, [])
