"""How long and how much may wait, and what is said to those that may not."""

from dataclasses import dataclass, field

from schemas.records import InferenceRequest
from streams.admission.arrival import OverloadPolicy
from streams.admission.fair_queue import FairQueue, QueuedRequest
from streams.admission.refusal import Refusal


@dataclass(frozen=True, slots=True)
class HandoffPolicy:
    """From its Dispatch on: how long prefill waits for the blocks that it asks decode for, and when a handoff
    has ended in one way or another (ms). A place at decode is kept until then at the longest."""

    reserve_ms: int = 500
    lease_ms: int = 10_000


@dataclass(frozen=True, slots=True)
class WaitingPolicy:
    """Bounds per model and class, in requests and tokens; the wait for any worker at all in ms; overload; how
    long a handoff may take."""

    max_queued_requests: int = 10_000
    max_queued_tokens: int = 20_000_000
    no_worker_wait_ms: int = 10_000
    overload: OverloadPolicy = field(default_factory=OverloadPolicy)
    handoff: HandoffPolicy = field(default_factory=HandoffPolicy)


def wait_until(policy: WaitingPolicy, request: InferenceRequest) -> int:
    """When waiting is of no more use (ms of the epoch). A retry has begun: only its end counts."""
    wait_ms = request.end_ms
    start_ms = request.start_ms or policy.overload.start_ms[request.priority]
    if start_ms and request.attempt == 1:
        wait_ms = min(wait_ms, start_ms)
    return request.accepted_at + wait_ms


def over_allowance(waiting: int, allowance: int | None, retry_after_ms: int) -> Refusal | None:
    """Why a request, which is among those that make `waiting` tokens of its tenant, may not wait."""
    if allowance is not None and waiting > allowance:
        return Refusal(
            429, "enqueued_tokens_exceeded", f"the limit is {allowance} tokens waiting", retry_after_ms
        )
    return None


def over_bounds(
    policy: WaitingPolicy, fair: FairQueue, item: QueuedRequest, retry_after_ms: int
) -> Refusal | None:
    """Why `item`, which waits in `fair` already, may not."""
    request = item.request
    # One request alone may wait whatever its size, else it could never be served.
    too_many_tokens = fair.num_tokens > policy.max_queued_tokens and fair.num_requests > 1
    if fair.num_requests > policy.max_queued_requests or too_many_tokens:
        message = f"too many requests wait for model {request.model!r}"
        return Refusal(503, "queue_full", message, retry_after_ms)
    return None


def expired(retry_after_ms: int) -> Refusal:
    return Refusal(503, "expired", "the request waited longer than it may", retry_after_ms)


def no_worker(model: str, retry_after_ms: int) -> Refusal:
    return Refusal(503, "no_worker", f"no worker can take a request for model {model!r} now", retry_after_ms)
