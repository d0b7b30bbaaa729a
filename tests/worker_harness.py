"""A worker process on a real broker, and a client that plays owner and admission around it."""

import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.codec import encode
from schemas.records import (
    Cancellation,
    Completion,
    Dispatch,
    Heartbeat,
    InferenceRequest,
    SamplingParams,
    Tokens,
    Usage,
)
from schemas.stream_state import Run, StreamState
from schemas.topics import Layout
from tests.log_reader import LogReader, Seen
from tests.service_process import ServiceProcess

LAYOUT = Layout(shards=2, worker_slots=6, gateway_slots=2)


class WorkerProcess(ServiceProcess):
    """`python -m workers` with the simulated runner."""

    def __init__(self, bootstrap: str, slot: int, log_dir: Path, settings: Mapping[str, str]) -> None:
        simulated = {"HEADRACE_MODELS_DIR": str(log_dir / "models"), "HEADRACE_RUNNER": "simulated"}
        super().__init__(["workers"], "worker", bootstrap, LAYOUT, slot, log_dir, {**simulated, **settings})

    @property
    def child_pid(self) -> int:
        """The worker proper, under its parent."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


class FleetClient(LogReader):
    """Reads all that workers say from when it was made on, in the order of each partition."""

    def values(self, kind: type[Any]) -> list[Any]:
        return [s.value for s in self.seen if isinstance(s.value, kind)]

    async def epoch(self, slot: int) -> int:
        """The epoch that now heartbeats in a slot."""
        heartbeat: Heartbeat = await self.wait_for(lambda: self.heartbeat(slot))
        return heartbeat.epoch

    def heartbeat(self, slot: int) -> Heartbeat | None:
        """The newest of a slot."""
        return next((h for h in reversed(self.values(Heartbeat)) if h.slot == slot), None)

    async def dispatch(self, slot: int, epoch: int, request: InferenceRequest) -> None:
        record = Dispatch(slot, epoch, 32, request)
        await self.producer.send_and_wait(
            topics.PREFILL, encode(record), partition=topics.partition(slot, request.priority)
        )

    async def cancel(self, request: InferenceRequest, **fields: Any) -> None:
        record = Cancellation(
            **{
                "request_id": request.request_id,
                "attempt": request.attempt,
                "tenant": request.tenant,
                "reason": "test",
                **fields,
            }
        )
        partition = topics.tenant_partition(request.tenant, request.priority, LAYOUT.shards)
        await self.producer.send_and_wait(topics.CANCELLATIONS, encode(record), partition=partition)

    def tokens(self, request: InferenceRequest) -> list[int]:
        return self.state(request).token_ids

    def state(self, request: InferenceRequest) -> StreamState:
        """The fold over what was read of the reply partition, for the attempt of `request`."""
        state = StreamState(
            request.request_id, attempt=request.attempt, token_ids=list(request.output_token_ids)
        )
        for seen in self.seen:
            if seen.topic != topics.TOKENS or seen.partition != request.reply_partition:
                continue
            if isinstance(seen.value, Tokens):
                for chunk in seen.value.chunks:
                    if chunk.request_id == request.request_id:
                        run = Run(seen.value.slot, seen.value.epoch)
                        state.apply_chunk(run, chunk, seen.timestamp)
            elif getattr(seen.value, "request_id", None) == request.request_id:
                state.apply(seen.value, seen.timestamp)
        return state

    async def end(self, request: InferenceRequest) -> tuple[Seen, Seen]:
        """The Completion of this attempt and its usage row, as soon as both are there."""

        def find() -> tuple[Seen, Seen] | None:
            ends = [s for s in self.seen if _is_about(s.value, Completion, request)]
            usages = [s for s in self.seen if _is_about(s.value, Usage, request)]
            return (ends[0], usages[0]) if ends and usages else None

        found: tuple[Seen, Seen] = await self.wait_for(find)
        return found


def _is_about(value: Any, kind: type[Any], request: InferenceRequest) -> bool:
    return isinstance(value, kind) and (value.request_id, value.attempt) == (
        request.request_id,
        request.attempt,
    )


_READ = (topics.TOKENS, topics.USAGE, topics.EVENTS, topics.HEARTBEATS)


def fleet_client(bootstrap: str) -> AbstractAsyncContextManager[FleetClient]:
    return FleetClient.open(bootstrap, LAYOUT, (*_READ, topics.DECISIONS, topics.dlq(topics.PREFILL)))


def handoff_client(bootstrap: str) -> AbstractAsyncContextManager[FleetClient]:
    """One that also reads what workers with roles say to each other."""
    return FleetClient.open(bootstrap, LAYOUT, (*_READ, topics.DECODE, topics.dlq(topics.DECODE)))


_numbers = iter(range(1, 1 << 30))


def make_inference_request(
    *,
    prompt_len: int = 8,
    max_tokens: int = 16,
    attempt: int = 1,
    priority: int = 0,
    request_id: bytes | None = None,
    output_token_ids: list[int] | None = None,
    model: str = "simulated",
    tenant: str = "acme",
) -> InferenceRequest:
    return InferenceRequest(
        request_id=request_id or os.urandom(12) + next(_numbers).to_bytes(4, "big"),
        attempt=attempt,
        tenant=tenant,
        priority=priority,
        model=model,
        prompt_token_ids=[65] * prompt_len,
        output_token_ids=output_token_ids or [],
        sampling=SamplingParams(max_tokens=max_tokens),
        reply_partition=topics.partition(1, priority),
        owner_epoch=1,
        accepted_at=1_700_000_000_000,
        end_ms=60_000,
    )
