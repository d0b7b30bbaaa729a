"""What clients were shown, kept by them for the accounts at the end."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from infra.benchmarks.returning_client import Delivery


class End(Enum):
    """How it ended for the client. UNANSWERED: it heard nothing of its request, which may run or not."""

    OPEN = "open"
    DONE = "done"
    LEFT = "left"
    REFUSED = "refused"
    UNANSWERED = "unanswered"
    FAILED = "failed"


@dataclass(slots=True)
class ClientRecord:
    """One request of one client. `began` and `delivery.at` are seconds of `time.perf_counter`."""

    kind: str
    tenant: str
    prompt: str
    max_tokens: int
    began: float
    delivery: Delivery = field(default_factory=Delivery)
    end: End = End.OPEN
    status: int = 0
    detail: str = ""

    @property
    def output_tokens(self) -> int:
        """As its last event says; of a stream without one, the events that came."""
        done = self.delivery.done
        return len(self.delivery.text) if done is None else int(done["usage"]["output_tokens"])

    def as_json(self) -> dict[str, Any]:
        return {
            "request_id": self.delivery.request_id.hex(),
            "stream_id": self.delivery.stream_id,
            "tenant": self.tenant,
            "kind": self.kind,
            "status": self.status,
            "tokens": self.output_tokens,
            "end": self.end.value,
            "detail": self.detail,
        }


@dataclass(slots=True)
class ItemRecord:
    """One item of batch work, and the answers that the client found: as many as it was
    published times, one as a rule."""

    custom_id: str
    max_tokens: int
    published: int = 0
    answers: list[dict[str, Any]] = field(default_factory=list)
