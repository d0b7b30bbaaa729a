"""What the owner wants done. The outbox does it, in this order."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.headers import Headers
from schemas.records import Attach, Cancellation, Claim, Detach, Failed, Restate, Retry, Usage

if TYPE_CHECKING:
    from gateway.owned_request import OwnedRequest


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Append the request to inference.requests (again), and tell the owner its offset."""

    owned: "OwnedRequest"


@dataclass(frozen=True, slots=True)
class Reply:
    """Append the owner's own word to the reply partition."""

    record: Failed | Retry
    reply_partition: int
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Announce:
    """Append to a reply partition a reader's word, or that this gateway takes the request over."""

    record: Attach | Detach | Cancellation | Claim
    reply_partition: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """To inference.cancellations; `behind_request` also to inference.requests, for admission's queue."""

    record: Cancellation
    partition: int
    behind_request: bool


@dataclass(frozen=True, slots=True)
class Bill:
    """A sealed usage row; `headers` as the worker's own has them."""

    record: Usage
    partition: int
    headers: Headers


@dataclass(frozen=True, slots=True)
class Restated:
    """To inference.requests, for who took the partition over."""

    record: Restate
    partition: int


Action = SendRequest | Reply | Announce | Cancel | Bill | Restated
