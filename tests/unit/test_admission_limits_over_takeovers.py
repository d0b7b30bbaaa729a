"""Limits over any history of admission processes, against a reference that knows what runs. Without Kafka."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import (
    ClassLimits,
    Dispatched,
    InferenceRequest,
    Restate,
    RestatedRequest,
    Usage,
)
from schemas.topics import NUM_CLASSES
from streams.admission.restating import ANNOUNCE_WAIT_MS
from tests.unit.test_admission_decisions import DISPATCHED, Driver

AT_ONCE = 3
PER_MINUTE = 200
MINUTE = 60_000
INPUT = 10  # of every request


@dataclass
class Truth:
    """What the owner and the worker know. `let_in`: when, and the most tokens each may come to."""

    running: dict[bytes, InferenceRequest] = field(default_factory=dict)
    rows: list[Usage] = field(default_factory=list)
    let_in: list[tuple[int, bytes]] = field(default_factory=list)
    cost: dict[bytes, int] = field(default_factory=dict)

    def most_in_any_window(self) -> None:
        """Tokens never exceed what the bucket holds and gains, over any window."""
        for i, (begin, _) in enumerate(self.let_in):
            spent = 0
            for at, request_id in self.let_in[i:]:
                spent += self.cost[request_id]
                assert spent <= PER_MINUTE + (at - begin) * PER_MINUTE / MINUTE + 1e-6


class World:
    def __init__(self) -> None:
        self.truth = Truth()
        self.entry = ClassLimits(0, tokens_per_minute=PER_MINUTE, max_concurrent_requests=AT_ONCE)
        self.driver = Driver(limits=[self.entry])
        self.driver.heartbeat(max_num_seqs=1_000)
        self.sent: list[InferenceRequest] = []

    @property
    def now(self) -> int:
        return self.driver.now

    def ask(self, max_tokens: int) -> None:
        request = self.driver.request(max_tokens=max_tokens, end_ms=60 * MINUTE)
        self.sent.append(request)
        self.send(request)

    def send(self, request: InferenceRequest) -> None:
        """Sent, again or for the first time; what its owner knows to run is not let in once more."""
        known = request.request_id in self.truth.cost
        if self.driver.send(request)[-1:] != [Dispatched] or known:
            return
        assert len(self.truth.running) < AT_ONCE
        self.truth.running[request.request_id] = request
        self.truth.let_in.append((self.now, request.request_id))
        self.truth.cost[request.request_id] = INPUT + request.sampling.max_tokens
        self.truth.most_in_any_window()

    def end(self, request: InferenceRequest, output: int) -> None:
        """A row of usage, which comes twice; so does a cancelled one's."""
        del self.truth.running[request.request_id]
        self.truth.cost[request.request_id] = INPUT + output
        self.driver.usage(request, output)
        row = Usage(
            request.request_id, request.attempt, False, "demo", 0, request.model, INPUT, 0, output, "length",
            request.accepted_at, self.now,
        )  # fmt: skip
        self.truth.rows.append(row)
        self.driver.usage(request, output)

    def retry(self, request: InferenceRequest) -> None:
        """Its worker is lost: another attempt, which passes whatever the limits say."""
        request.attempt += 1
        assert self.driver.send(request) == DISPATCHED

    def take_over(self) -> None:
        """The process dies. Another learns from the owner and from the last minute's rows what there is."""
        dead, self.driver = self.driver, Driver(limits=[self.entry])
        heir = self.driver
        heir.now, heir.offset = dead.now, dead.offset + 1
        heir.admission.on_assigned({}, heir.now)
        heir.admission.on_assigned(dict.fromkeys(range(6), heir.offset), heir.now)
        heir.heartbeat(max_num_seqs=1_000)
        told = [
            RestatedRequest(
                request_id=r.request_id,
                attempt=r.attempt,
                tenant="demo",
                priority=0,
                input_tokens=INPUT,
                output_tokens=r.sampling.max_tokens,
                age_ms=self.now - r.accepted_at,
                end_ms=r.end_ms,
            )
            for r in self.truth.running.values()
        ]
        restating = heir.admission.restating
        for _ in range(2):  # an owner may say it twice
            restating.on_restate(Restate("gateway", 0, 1, heir.offset, told), 0, heir.now)
        for row in self.truth.rows:
            if row.ended_at > heir.now - MINUTE:
                heir.admission.on_usage(row, heir.now, 0)
        for partition in range(2 * NUM_CLASSES):
            restating.usage_is_read(partition)
        restating.open_due(heir.admission.fleet, heir.now + ANNOUNCE_WAIT_MS)
        assert restating.all_open

    def check(self) -> None:
        limits = self.driver.admission.limits
        assert limits.num_concurrent("demo", 0) == len(self.truth.running)
        reserved = sum(INPUT + r.sampling.max_tokens for r in self.truth.running.values())
        assert limits.reserved_tokens("demo", 0) == reserved


STEP = st.sampled_from(["ask", "ask", "ask", "end", "cancel", "retry", "resend", "take_over", "tick"])


@settings(max_examples=150)
@given(st.lists(st.tuples(STEP, st.integers(0, 3_000), st.integers(1, 90), st.integers(0, 999)), max_size=40))
def test_a_tenant_has_what_it_may_and_no_more_whoever_dies(steps: list[tuple[str, int, int, int]]) -> None:
    world = World()
    for what, wait, amount, pick in steps:
        world.driver.tick(wait)
        open_now = list(world.truth.running.values())
        chosen = open_now[pick % len(open_now)] if open_now else None
        match what:
            case "ask":
                world.ask(amount)
            case "end" if chosen is not None:
                world.end(chosen, min(amount, chosen.sampling.max_tokens))
            case "cancel" if chosen is not None:
                world.driver.cancel(chosen)
                world.end(chosen, 0)
            case "retry" if chosen is not None:
                world.retry(chosen)
            case "resend" if world.sent:
                request = world.sent[pick % len(world.sent)]
                # Owners send again what has not begun, or what they were not told has.
                if request.request_id not in world.truth.cost or request.request_id in world.truth.running:
                    world.send(request)
            case "take_over":
                world.take_over()
        world.check()
    for request in list(world.truth.running.values()):
        world.end(request, 1)
        world.check()
    # All of it is there again, a minute later.
    world.driver.tick(2 * MINUTE)
    assert world.driver.admission.limits.num_remembered() == 0
    world.ask(PER_MINUTE - INPUT)
    assert len(world.truth.running) == 1
