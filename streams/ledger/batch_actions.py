"""What a batch shard wants done, and what it is told of admission."""

from dataclasses import dataclass

from schemas.records import Cancellation, Claim, Failed, InferenceRequest, Restate, Retry, Usage
from streams.ledger.batch_records import Source


@dataclass(frozen=True, slots=True)
class SendRequest:
    """To inference.requests; `on_sent` wants the offset."""

    request: InferenceRequest


@dataclass(frozen=True, slots=True)
class Append:
    """To the shard's reply partition."""

    record: Retry | Failed | Claim


@dataclass(frozen=True, slots=True)
class Restated:
    """To the shard's partition of inference.requests, for who took that over."""

    record: Restate


@dataclass(frozen=True, slots=True)
class CancelRun:
    record: Cancellation


Action = SendRequest | Append | CancelRun | Restated


@dataclass(frozen=True, slots=True)
class Answer:
    """One record for batch.results. `seal` must be acked before it goes out."""

    source: Source
    value: bytes
    ok: bool
    seal: Usage | None = None


@dataclass(frozen=True, slots=True)
class AdmissionOffsets:
    """What admission says of one partition of inference.requests."""

    takeover: int
    read: int
