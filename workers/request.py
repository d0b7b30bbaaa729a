"""A request as the engine sees it: token ids, progress, blocks, and how it ends."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Protocol

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from schemas.sampling import TokenLogprobs
from workers.token_counts import TokenCounts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


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
    ENGINE_FAULT: it goes on from what somebody computed wrong.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    SUPERSEDED = "superseded"
    ENGINE_FAULT = "engine_fault"


class StopChecker(Protocol):
    """Looks for stop strings in the text of one request's output, whatever tokens they are cut into."""

    @property
    def num_held(self) -> int:
        """How many of the newest output tokens must not be shown yet: their text may become a stop string."""

    def push(self, token_id: int) -> int | None:
        """Takes the next output token. Once a stop string is complete: the characters of text to keep."""


class TokenConstraint(Protocol):
    """Where one request's output stands in its grammar."""

    @property
    def error(self) -> str:
        """Not empty once the grammar cannot be gone on with: the request must end, its last token is void."""

    def fill_bitmask(self, row: "npt.NDArray[np.int32]") -> None:
        """Sets bit `token_id % 32` of word `token_id // 32` if the token may be next, clears others."""

    def advance(self, token_id: int) -> None:
        """Takes the next output token, one that was allowed."""


@dataclass(slots=True, eq=False)
class Request:
    """One attempt of one request inside one engine.

    `output_token_ids` starts with what earlier attempts produced (`num_resumed_tokens` of them): the
    engine prefills prompt + output and goes on sampling at position `len(output_token_ids)`.

    `block_table` are its device blocks; while it is swapped out, `host_block_table` holds its KV instead.
    `block_hashes` are the chained hashes of its full blocks, as far as they were needed; the first
    `num_registered_blocks` of its table were offered to the prefix cache. `num_cached_tokens` were found in
    it when the request was first admitted. `num_held_tokens` of the newest output tokens were not told to
    anybody yet. `num_preemptions` counts how often it lost its place in the batch; `num_lost_tokens` had KV
    that was dropped then, `num_recomputed_tokens` is how much was computed again so far. The scheduler sets
    `max_output_tokens`, where its length ends it at the latest, and `num_expected_blocks`, which it is
    reckoned to hold at its end. It takes `num_seats` places among max_num_seqs: one, or none for what the
    engine runs for itself. The sampler keeps `token_counts` where penalties need them.

    Units: all lengths in tokens, tables in block ids, times nowhere.
    """

    request_id: bytes
    attempt: int
    priority: PriorityClass
    prompt_token_ids: list[int]
    sampling: SamplingParams
    reply_partition: int
    output_token_ids: list[int] = field(default_factory=list)
    expected_output_tokens: int | None = None
    tenant: str = ""
    stop_checker: StopChecker | None = None
    constraint: TokenConstraint | None = None
    num_seats: int = 1
    arrival: int = 0
    status: RequestStatus = RequestStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    host_block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_registered_blocks: int = 0
    num_cached_tokens: int = 0
    num_held_tokens: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_expected_blocks: int = 0
    num_shared_blocks: int = 0
    max_output_tokens: int = 0
    token_counts: TokenCounts | None = None
    num_resumed_tokens: int = field(init=False)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_resumed_tokens = len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the next step may need: prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_kv_tokens_at_most(self) -> int:
        """Whose KV it holds at its end: the last token is sampled but never computed."""
        return len(self.prompt_token_ids) + self.max_output_tokens - 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens start … end - 1 of prompt and output."""
        prompt, output = self.prompt_token_ids, self.output_token_ids
        if start >= len(prompt):
            return output[start - len(prompt) : end - len(prompt)]
        return prompt[start:end] + output[: max(0, end - len(prompt))]

    def transition_to(self, status: RequestStatus) -> None:
        """Raises ValueError on a move that the table does not hold."""
        if status not in _TRANSITIONS[self.status]:
            raise ValueError(f"request {self.request_id.hex()}: {self.status.value} -> {status.value}")
        self.status = status


@dataclass(slots=True)
class RequestOutput:
    """What one step did for one request: `token_ids` from output position `position` on, and its end if any.

    `error` says what was wrong when the finish reason is ERROR, else it is empty. `logprobs` has an entry for
    each token if the request asked for them. `text_length` is where a stop string cuts the text of the whole
    output, in characters.
    """

    request: Request
    position: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_length: int | None = None
