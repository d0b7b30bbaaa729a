"""What admission decides. The process around it carries the actions out and reports back."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.headers import Headers, ReplyTo
from schemas.records import (
    Admitted,
    Dispatch,
    Dispatched,
    Duplicate,
    InferenceRequest,
    KeyedRequest,
    Pairing,
    RateLimit,
    Rejected,
)
from streams.admission.fair_queue import QueuedRequest
from streams.admission.idempotency import keyed
from streams.admission.in_flight import InFlight
from streams.admission.pairing import Route
from streams.admission.refusal import Refusal
from streams.admission.router import PoolChange
from streams.admission.shedding import LevelChange
from streams.admission.waiting import HandoffPolicy
from streams.admission.worker import Worker


@dataclass(slots=True)
class Reply:
    """Tell the owner, in its reply partition."""

    to: ReplyTo
    record: Admitted | Dispatched | Duplicate | Rejected
    traceparent: str | None = None


@dataclass(slots=True)
class Assign:
    """Put `dispatch` into the worker's mailbox, then call `Admission.on_dispatched` or `on_dispatch_failed`.

    The worker and its in-flight entry are the router's; `queued_ms` is how long the request waited, `record`
    is the request as it lies in inference.requests, at `partition` and `offset`. `keyed` is to be acked
    before.
    """

    dispatch: Dispatch
    worker: Worker
    in_flight: InFlight
    queued_ms: int
    record: bytes
    partition: int
    offset: int
    traceparent: str | None = None
    keyed: KeyedRequest | None = None
    rate_limits: list[RateLimit] = field(default_factory=list)


@dataclass(slots=True)
class NoteKey:
    """Tell later holders of the partition that a key is free again, behind the note that it was not."""

    keyed: KeyedRequest
    partition: int


@dataclass(slots=True)
class DeadLetter:
    """Keep a record of inference.requests that cannot be served; `headers` hold the reason."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(slots=True)
class Announce:
    """Tell the fleet that a model's shedding level changed."""

    change: LevelChange


@dataclass(slots=True)
class AnnouncePool:
    """Tell the fleet that a pool of a model's workers is gone, or there again."""

    change: PoolChange


Action = Reply | Assign | NoteKey | DeadLetter | Announce | AnnouncePool


def reply_to(request: InferenceRequest) -> ReplyTo:
    return ReplyTo(request.request_id, request.attempt, request.reply_partition)


def reject(
    to: ReplyTo, refusal: Refusal, traceparent: str | None = None, rate_limits: Sequence[RateLimit] = ()
) -> Reply:
    """`rate_limits`: what its tenant has left."""
    record = Rejected(
        to.request_id,
        to.attempt,
        refusal.status,
        refusal.code,
        refusal.message,
        refusal.retry_after_ms,
        list(rate_limits),
    )
    return Reply(to, record, traceparent)


def admitted(item: QueuedRequest) -> Reply:
    """Tells the owner that its request waits."""
    request = item.request
    record = Admitted(
        request.request_id,
        request.attempt,
        request.owner_epoch,
        item.partition,
        item.offset,
        item.rate_limits,
    )
    return Reply(reply_to(request), record, item.traceparent)


def place_of(request: InferenceRequest, partition: int, offset: int, traceparent: str | None) -> Reply:
    """Tells the owner, or who comes after it, where a request lies that nothing was decided about."""
    record = Admitted(request.request_id, request.attempt, request.owner_epoch, partition, offset)
    return Reply(reply_to(request), record, traceparent)


def assign(
    item: QueuedRequest, route: Route, entry: InFlight, queued_ms: int, handoff: HandoffPolicy
) -> Assign:
    """Gives what waited for `queued_ms` to the route's worker, where `entry` counts it."""
    request, worker, decode = item.request, route.worker, route.decode
    pairing = None
    if decode is not None:
        # Whoever else decides the same gives it the same name.
        named = struct.pack(">16sQQQ", request.request_id, request.attempt, worker.epoch, decode.epoch)
        name = hashlib.blake2b(named, digest_size=16).digest()
        pairing = Pairing(name, decode.slot, decode.epoch, handoff.reserve_ms, handoff.lease_ms)
    first = request.attempt == 1 and request.idempotency is not None
    return Assign(
        Dispatch(worker.slot, worker.epoch, item.expected_output_tokens, request, pairing),
        worker,
        entry,
        queued_ms,
        item.record,
        item.partition,
        item.offset,
        item.traceparent,
        keyed(request) if first else None,
        item.rate_limits,
    )


def dispatched(
    request: InferenceRequest,
    slot: int,
    epoch: int,
    partition: int,
    offset: int,
    traceparent: str | None,
    rate_limits: list[RateLimit],
    granted_max_tokens: int | None = None,
    prefill: tuple[int, int] | None = None,
) -> Reply:
    """Tells the owner which run has its request, which lies at `partition` and `offset`, what its tenant has
    left, `granted_max_tokens` where it is less than the request asked for, and the `prefill` run that
    computes the prompt for that one."""
    record = Dispatched(
        request_id=request.request_id,
        attempt=request.attempt,
        owner_epoch=request.owner_epoch,
        slot=slot,
        epoch=epoch,
        model=request.model,
        requests_partition=partition,
        requests_offset=offset,
        rate_limits=rate_limits,
        max_tokens=granted_max_tokens,
    )
    if prefill is not None:
        record.prefill_slot, record.prefill_epoch = prefill
    return Reply(reply_to(request), record, traceparent)
