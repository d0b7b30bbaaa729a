"""What happened in a simulated fleet, noted as cheaply as it goes; `report.py` makes figures of it."""

from array import array
from dataclasses import dataclass, field

from infra.simulator.workload import Arrival
from schemas.priority import PriorityClass
from schemas.records import Decision, Usage


@dataclass(slots=True, eq=False)
class Flight:
    """One request as its owner sees it, over all attempts. Times in seconds, None: it did not come to that.

    `first_token_at` and `last_token_at` are when the tokens were computed. `refused` is a code of admission,
    `failed` says why a request that was let in came to nothing.
    """

    number: int
    arrival: Arrival
    attempt: int = 1
    slot: int = -1
    epoch: int = -1
    num_losses: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    dispatched_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float | None = None
    refused: str | None = None
    refused_status: int = 0
    failed: str | None = None

    @property
    def first_token_ms(self) -> int | None:
        """From its dispatch to its first token, as its worker says; None where a run was lost before."""
        if self.first_token_at is None or self.dispatched_at is None or self.attempt > 1:
            return None
        return int((self.first_token_at - self.dispatched_at) * 1_000)


class GapLog:
    """Times between tokens of one class: `count` sequences waited for `gap` until `at`."""

    __slots__ = ("at", "count", "gap")

    def __init__(self) -> None:
        self.at, self.gap, self.count = array("d"), array("d"), array("q")

    def add(self, at: float, gap: float, count: int) -> None:
        self.at.append(at)
        self.gap.append(gap)
        self.count.append(count)

    def extend(self, at: list[float], gap: list[float], count: int) -> None:
        """Several, of as many sequences each."""
        self.at.extend(at)
        self.gap.extend(gap)
        self.count.extend([count] * len(at))


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """Of one whose prompt was computed at `computed_at`: bytes sent, how long sending went on after that, and
    how long until decode had the request (s)."""

    computed_at: float
    num_bytes: float
    visible_s: float
    handed_over_s: float


@dataclass(slots=True)
class Sample:
    """The fleet at one time, as its heartbeats tell. `kv_use` is 0 … 1 of each worker that lives, by slot."""

    at: float
    kv_use: dict[int, float]
    num_running: int
    num_queued: tuple[int, ...]


@dataclass(slots=True)
class Measures:
    """`gaps` are by model and class.

    `token_log`, if there is one, gets (request number, position, time) of each token. `record`, if there is
    one, gets what lies on fleet.decisions and inference.usage, in order.
    """

    flights: list[Flight] = field(default_factory=list)
    gaps: dict[str, tuple[GapLog, ...]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    handoffs: list[HandoffTimes] = field(default_factory=list)
    num_retries: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_steps_leapt: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    ended_at: float = 0.0
    token_log: list[tuple[int, int, float]] | None = None
    record: list[Decision | Usage] | None = None

    def gaps_of(self, model: str) -> tuple[GapLog, ...]:
        """The model's logs, by class."""
        return self.gaps.setdefault(model, tuple(GapLog() for _ in PriorityClass))
