"""What the log says of one request: the fold of its reply partition, and what lies elsewhere. Pure."""

from dataclasses import dataclass, field

from schemas.records import Completion
from schemas.stream_state import RETRYABLE_FINISHES, Run, StreamState
from streams.ledger.billing import UsageRow


@dataclass(slots=True)
class History:
    """Times are ms of the epoch, by the broker's clock but for `accepted_at`.

    `is_item`: its owner is a batch coordinator. `num_tokens` is what the fold counts; the ids are kept in
    `state` only while they are needed. `attempts_sent` is the highest attempt in inference.requests,
    `attempts_told` that of which its reply partition tells that it was given to a run. `ran`: a run was
    bound, in whatever attempt. `joined`: another request with its Idempotency-Key was first. `cancels`:
    (attempts up to, when). `early_tokens`: those that count and lay in the log some time before a cancel;
    `late_steps`: after one, the last at `last_token_at`. `row` is the usage row that counts,
    `rows_of` the runs that wrote one of the attempt `row` is of, owners' rows left out.
    """

    request_id: bytes
    tenant: str
    accepted_at: int
    end_ms: int
    input_tokens: int
    is_item: bool
    state: StreamState
    attempts_sent: int = 1
    attempts_told: int = 0
    num_tokens: int = 0
    ran: bool = False
    joined: bool = False
    waived: bool = False
    ended_twice: bool = False
    ended_at: int | None = None
    cancels: list[tuple[int, int]] = field(default_factory=list)
    early_tokens: int = 0
    late_steps: int = 0
    last_token_at: int = 0
    row: UsageRow | None = None
    rows_of: set[Run] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.request_id.hex()

    @property
    def is_over(self) -> bool:
        """The log has its end, and not only that of an attempt that is to be followed by another."""
        return self.joined or (self.state.end is not None and (not self.state.may_retry or self.is_cancelled))

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled_at(self.state.attempt) is not None

    @property
    def has_normal_end(self) -> bool:
        end = self.state.end
        return isinstance(end, Completion) and end.finish_reason not in RETRYABLE_FINISHES

    def cancelled_at(self, attempt: int) -> int | None:
        """When this attempt was first asked to stop, with all before it."""
        return min((when for up_to, when in self.cancels if up_to >= attempt), default=None)
