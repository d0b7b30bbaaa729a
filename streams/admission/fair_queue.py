"""The queue of one model and class: fair between tenants by weighted tokens.

Start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", SIGCOMM 1996, section 2): the head
of a tenant's line gets the start tag max(v, finish tag of the tenant's last), its finish tag is
start + tokens / weight; the smallest start tag is served, and v is the tag last served. A tenant that was
away gets no credit for it, and one that floods waits behind its own requests only. With nobody left
waiting all begin at the same tag again. Tags are given when a request comes to the head of its line, so
what was cancelled behind it costs its tenant nothing.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from schemas.records import InferenceRequest, RateLimit
from streams.admission.affinity import PromptPrefix
from streams.admission.arrival import Arrival

FORGET_LINES = 1024


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """An attempt that waits. `tokens` is its cost: what is to be computed for it, prompt and expected output.

    `end_at` and `queued_at` are ms of the epoch; `arrival` is what was seen when it came, `rate_limits` what
    its tenant had left behind it. `partition` and `offset` say where in inference.requests it lies, `record`
    is the request as it lies there.
    """

    request: InferenceRequest
    partition: int
    offset: int
    tokens: int
    expected_output_tokens: int
    queued_at: int
    end_at: int
    record: bytes = b""
    traceparent: str | None = None
    rate_limits: list[RateLimit] = field(default_factory=list)
    waits: bool = True
    arrival: Arrival | None = None
    prefix: PromptPrefix = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = PromptPrefix(self.request)


@dataclass(slots=True, eq=False)
class _Line:
    """A tenant's requests in order. `finish` is the finish tag of the last one served."""

    weight: float
    finish: float = 0.0
    start: float = 0.0
    tokens: int = 0
    num_requests: int = 0
    in_heap: bool = False
    items: deque[QueuedRequest] = field(default_factory=deque)


class FairQueue:
    """O(log tenants) to add and take; O(1) to cancel, which marks and leaves the rest to `first`."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._heap: list[tuple[float, int, _Line]] = []
        self._retries: deque[QueuedRequest] = deque()
        self._virtual = 0.0
        self._count = 0
        self._cancelled = 0
        self._forget_at = FORGET_LINES
        self._arrivals: deque[QueuedRequest] = deque()
        self._waiting_weight = 0.0
        self.num_requests = 0
        self.num_tokens = 0

    def append(self, item: QueuedRequest, weight: float) -> None:
        """Adds to the end of its tenant's line; a retry goes before all first attempts."""
        self.num_requests += 1
        self.num_tokens += item.tokens
        if item.request.attempt > 1:
            self._retries.append(item)
            return
        line = self._lines.get(item.request.tenant)
        if line is None:
            line = self._lines[item.request.tenant] = _Line(weight)
        if line.num_requests:
            self._waiting_weight -= line.weight
        self._waiting_weight += weight
        line.weight = weight
        line.tokens += item.tokens
        line.num_requests += 1
        line.items.append(item)
        self._enter(line)
        self._arrivals.append(item)
        if len(self._arrivals) > 2 * self.num_requests + 1024:
            self._arrivals = deque(item for item in self._arrivals if item.waits)

    def first(self, skip_retries: int = 0) -> QueuedRequest | None:
        """The next to be served, and stays; past the first `skip_retries` retries."""
        while self._retries and not self._retries[0].waits:
            self._retries.popleft()
            self._cancelled -= 1
        for item in self._retries:
            if item.waits:
                if skip_retries == 0:
                    return item
                skip_retries -= 1
        while self._heap:
            line = self._heap[0][2]
            while line.items and not line.items[0].waits:
                line.items.popleft()
                self._cancelled -= 1
            if line.items:
                return line.items[0]
            self._leave(line)
        return None

    def take(self, item: QueuedRequest) -> None:
        """Takes out what `first` gave."""
        self._uncount(item)
        if item.request.attempt > 1:
            self._retries.remove(item)
        else:
            self._take_first_attempt(item)
        if self.num_requests == 0:
            self._end_busy_period()

    def cancel(self, item: QueuedRequest) -> None:
        """Takes out any request that waits here."""
        self._uncount(item)
        self._cancelled += 1
        if item.request.attempt == 1:
            self._leaves(self._lines[item.request.tenant], item)
        if self.num_requests == 0:
            self._end_busy_period()
        elif self._cancelled > self.num_requests + 1024:
            self._compact()

    def tenant_tokens(self, tenant: str) -> int:
        """Tokens of a tenant's first attempts that wait."""
        line = self._lines.get(tenant)
        return 0 if line is None else line.tokens

    def tenant_requests(self, tenant: str) -> int:
        """A tenant's first attempts that wait."""
        line = self._lines.get(tenant)
        return 0 if line is None else line.num_requests

    def share(self, tenant: str, weight: float) -> float:
        """The part of what is served that a tenant may count on while all who wait now go on, 0 … 1."""
        line = self._lines.get(tenant)
        others = self._waiting_weight - (line.weight if line is not None and line.num_requests else 0.0)
        return weight / (weight + max(0.0, others))

    def tokens_ahead(self, tenant: str, weight: float, tokens: int) -> float:
        """What is served before a request of `tokens` that the tenant adds now has been, itself left out.

        While the tenant gets x tokens, others get at most x times their weight over its own, and no more than
        they have. An estimate from above, in O(1).
        """
        own = self.tenant_tokens(tenant) + tokens
        return min(float(self.num_tokens), own / self.share(tenant, weight) - tokens)

    def longest_wait_ms(self, now: int) -> int:
        """How long the first attempt that came first has waited."""
        while self._arrivals and not self._arrivals[0].waits:
            self._arrivals.popleft()
        return max(0, now - self._arrivals[0].queued_at) if self._arrivals else 0

    def _take_first_attempt(self, item: QueuedRequest) -> None:
        line = self._lines[item.request.tenant]
        popped = line.items.popleft()
        if popped is not item or self._heap[0][2] is not line:
            raise ValueError(f"request {item.request.request_id.hex()} is not the first of its queue")
        self._virtual = line.start
        line.finish = line.start + item.tokens / line.weight
        self._leaves(line, item)
        heapq.heappop(self._heap)
        line.in_heap = False
        if line.items:
            self._enter(line)
        elif len(self._lines) >= self._forget_at:
            self._forget_idle_lines()

    def _uncount(self, item: QueuedRequest) -> None:
        if not item.waits:
            raise ValueError(f"request {item.request.request_id.hex()} does not wait")
        item.waits = False
        self.num_requests -= 1
        self.num_tokens -= item.tokens

    def _leaves(self, line: _Line, item: QueuedRequest) -> None:
        line.tokens -= item.tokens
        line.num_requests -= 1
        if line.num_requests == 0:
            self._waiting_weight -= line.weight

    def _enter(self, line: _Line) -> None:
        if not line.in_heap:
            line.start = max(self._virtual, line.finish)
            line.in_heap = True
            self._count += 1  # ties go to who came first
            heapq.heappush(self._heap, (line.start, self._count, line))

    def _leave(self, line: _Line) -> None:
        heapq.heappop(self._heap)
        line.in_heap = False

    def _end_busy_period(self) -> None:
        # Nobody waits, so nobody is owed anything (section 2: v becomes the largest finish tag).
        self._lines.clear()
        self._heap.clear()
        self._retries.clear()
        self._arrivals.clear()
        self._virtual, self._waiting_weight, self._cancelled = 0.0, 0.0, 0

    def _compact(self) -> None:
        self._retries = deque(item for item in self._retries if item.waits)
        for line in self._lines.values():
            line.items = deque(item for item in line.items if item.waits)
        self._cancelled = 0

    def _forget_idle_lines(self) -> None:
        # A line whose finish tag has passed would start at v like a new one.
        idle = [name for name, line in self._lines.items() if not line.items and line.finish <= self._virtual]
        for name in idle:
            del self._lines[name]
        self._forget_at = max(FORGET_LINES, 2 * len(self._lines))
