"""A request as the engine sees it: token ids, progress, blocks, and how it ends."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from schemas.priority import PriorityClass
from schemas.records import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class FinishReason(StrEnum):
    """Why a request ended in this engine.

    STOP: an end or stop token. LENGTH: max_tokens or the context is reached. CANCELLED: asked for. ERROR:
    refused, see `RequestOutput.error`. SUPERSEDED: a higher attempt came; nobody waits for this one.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    SUPERSEDED = "superseded"


@dataclass(slots=True, eq=False)
class Request:
    """One attempt of one request inside one engine.

    `output_token_ids` starts with what earlier attempts produced (`num_resumed_tokens` of them): the
    engine prefills prompt + output and goes on sampling at position `len(output_token_ids)`.

    Units: all lengths in tokens, `block_table` in block ids, times nowhere.
    """

    request_id: bytes
    attempt: int
    priority: PriorityClass
    prompt_token_ids: list[int]
    sampling: SamplingParams
    reply_partition: int
    output_token_ids: list[int] = field(default_factory=list)
    expected_output_tokens: int | None = None
    arrival: int = 0
    status: RequestStatus = RequestStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_resumed_tokens: int = field(init=False)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_resumed_tokens = len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the next step may need: prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def transition_to(self, status: RequestStatus) -> None:
        """Raises ValueError on a move that the table does not hold."""
        if status not in _TRANSITIONS[self.status]:
            raise ValueError(f"request {self.request_id.hex()}: {self.status.value} -> {status.value}")
        self.status = status


@dataclass(slots=True)
class RequestOutput:
    """What one step did for one request: `token_ids` from output position `position` on, and its end if any.

    `error` says what was wrong when the finish reason is ERROR, else it is empty.
    """

    request: Request
    position: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str = ""
