"""What a batch shard wants done, and what it is told of admission."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.records import Cancellation, Claim, Failed, InferenceRequest, Restate, Retry, Usage
from streams.ledger.batch_item import FileSource, Source


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
    """`behind_request`: also to where the requests lie, for what waits in admission's queue."""

    record: Cancellation
    behind_request: bool = False


@dataclass(frozen=True, slots=True)
class Seal:
    """The owner's row of a request that was answered: what it is billed, whatever a run writes."""

    usage: Usage


Action = SendRequest | Append | CancelRun | Restated | Seal


@dataclass(frozen=True, slots=True)
class Answer:
    """One record for batch.results. `seals` must be acked before it goes out. Without `request_id` it is of a
    record that is no request."""

    source: Source
    value: bytes
    ok: bool
    seals: Sequence[Usage] = ()
    request_id: bytes | None = None


@dataclass(frozen=True, slots=True)
class FileAnswer:
    """One line for a job's output file, or where `code` says why there is no answer, for its error file.
    `sent`: how many requests it was.

    The tokens are those billed. `seals` must be acked before the job's state counts the line.
    """

    source: FileSource
    request_id: bytes
    line: bytes
    code: str | None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seals: Sequence[Usage] = ()
    sent: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionOffsets:
    """What admission says of one partition of inference.requests."""

    takeover: int
    read: int
