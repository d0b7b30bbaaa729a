"""Whether a request without a run is sent again: by offsets, not by a clock (architecture §4). Pure."""

from enum import Enum, auto

from streams.ledger.batch_actions import AdmissionOffsets
from streams.ledger.open_request import OpenRequest

# Read by admission and no answer: send again after this, this many times, then as if refused.
UNANSWERED_MS = 1_000
MAX_RESENDS = 3


class Resend(Enum):
    NO = auto()
    SEND = auto()
    BACK_OFF = auto()


def resend(request: OpenRequest, said: AdmissionOffsets | None, now_ms: int) -> Resend:
    """`said`: what admission says of the partition where the shard's requests lie."""
    if said is None or request.sent_offset is None:
        return Resend.NO
    if request.sent_offset < said.takeover:
        return Resend.SEND
    answered = request.state.requests_offset is not None
    if answered or said.read <= request.sent_offset:
        request.unanswered_at = None
        return Resend.NO
    if request.unanswered_at is None:
        request.unanswered_at = now_ms
    if now_ms - request.unanswered_at < UNANSWERED_MS:
        return Resend.NO
    if request.resends >= MAX_RESENDS:
        return Resend.BACK_OFF
    request.resends += 1
    return Resend.SEND
