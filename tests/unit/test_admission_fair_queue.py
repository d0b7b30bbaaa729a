import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.admission.fair_queue import FORGET_LINES, FairQueue, QueuedRequest
from tests.admission_harness import make_request


def item(tenant: str, tokens: int = 10, attempt: int = 1) -> QueuedRequest:
    request = make_request(tenant=tenant, attempt=attempt)
    return QueuedRequest(request, 0, 0, tokens, 1, 0, 0)


def serve(queue: FairQueue) -> QueuedRequest:
    first = queue.first()
    assert first is not None
    queue.take(first)
    return first


def test_a_flood_waits_behind_itself() -> None:
    queue = FairQueue()
    flood = [item("flood") for _ in range(100)]
    for entry in flood:
        queue.append(entry, 1.0)
    for _ in range(10):
        serve(queue)
    late = item("late")
    queue.append(late, 1.0)
    assert late in [serve(queue), serve(queue)]


def test_a_tenant_keeps_its_order() -> None:
    queue = FairQueue()
    entries = [item("a", tokens) for tokens in (50, 1, 20)]
    for entry in entries:
        queue.append(entry, 1.0)
    assert [serve(queue) for _ in entries] == entries
    assert queue.first() is None


def test_retries_go_first() -> None:
    queue = FairQueue()
    queue.append(item("a"), 1.0)
    retries = [item("a", attempt=2), item("b", attempt=3)]
    for entry in retries:
        queue.append(entry, 1.0)
    assert queue.first(1) is retries[1]
    last = queue.first(2)
    assert last is not None
    assert last.request.attempt == 1
    queue.cancel(retries[0])
    assert queue.first() is retries[1]
    queue.take(retries[1])
    assert serve(queue).request.attempt == 1
    assert queue.first() is None


def test_what_is_cancelled_is_not_served_and_costs_nothing() -> None:
    queue = FairQueue()
    dear, cheap, other = item("a", 1_000), item("a"), item("b")
    for entry in (dear, cheap, other):
        queue.append(entry, 1.0)
    queue.cancel(dear)
    assert (queue.num_requests, queue.num_tokens, queue.tenant_tokens("a")) == (2, 20, 10)
    assert [serve(queue), serve(queue)] == [cheap, other]
    with pytest.raises(ValueError, match="does not wait"):
        queue.cancel(dear)


def test_only_the_first_can_be_taken() -> None:
    queue = FairQueue()
    entries = [item("a"), item("a")]
    for entry in entries:
        queue.append(entry, 1.0)
    with pytest.raises(ValueError, match="not the first"):
        queue.take(entries[1])


def test_idle_tenants_are_forgotten() -> None:
    queue = FairQueue()
    queue.append(item("busy"), 1.0)  # so that the busy period never ends
    for n in range(10 * FORGET_LINES):
        queue.append(item("busy" if n % 2 else f"t{n}"), 1.0)
        serve(queue)
    assert queue.num_requests == 1
    assert len(queue._lines) <= 2 * FORGET_LINES + 1


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}
TENANTS = st.sampled_from(sorted(WEIGHTS))
COSTS = st.integers(1, 100)


@given(st.lists(COSTS, min_size=60, max_size=60), st.integers(1, 120))
def test_backlogged_tenants_share_by_weight(costs: list[int], served: int) -> None:
    """SFQ, theorem 1: |W_a/w_a - W_b/w_b| ≤ max_a/w_a + max_b/w_b while both wait."""
    queue = FairQueue()
    entries = {name: [item(name, cost) for cost in costs] for name in WEIGHTS}
    for name, line in entries.items():
        for entry in line:
            queue.append(entry, WEIGHTS[name])
    work = dict.fromkeys(WEIGHTS, 0)
    left = dict.fromkeys(WEIGHTS, len(costs))
    for _ in range(served):
        first = serve(queue)
        work[first.request.tenant] += first.tokens
        left[first.request.tenant] -= 1
        if not all(left.values()):
            break
        for x in WEIGHTS:
            for y in WEIGHTS:
                bound = max(costs) / WEIGHTS[x] + max(costs) / WEIGHTS[y]
                assert abs(work[x] / WEIGHTS[x] - work[y] / WEIGHTS[y]) <= bound + 1e-6


@given(
    st.lists(
        st.tuples(st.sampled_from("aaasssc"), TENANTS, COSTS, st.integers(0, 99), st.booleans()), max_size=200
    )
)
def test_nothing_is_lost_doubled_or_miscounted(
    steps: list[tuple[str, str, int, int, bool]],
) -> None:
    queue, waiting = FairQueue(), list[QueuedRequest]()
    for what, tenant, cost, pick, retry in steps:
        if what == "a":
            entry = item(tenant, cost, 2 if retry else 1)
            queue.append(entry, WEIGHTS[tenant])
            waiting.append(entry)
        elif what == "s":
            first = queue.first()
            assert (first is None) == (not waiting)
            if first is not None:
                if any(entry.request.attempt > 1 for entry in waiting):
                    assert first.request.attempt > 1
                queue.take(first)
                waiting.remove(first)
        elif waiting:
            gone = waiting.pop(pick % len(waiting))
            queue.cancel(gone)
        assert queue.num_requests == len(waiting)
        assert queue.num_tokens == sum(entry.tokens for entry in waiting)
        for name in WEIGHTS:
            first_attempts = [e for e in waiting if e.request.tenant == name and e.request.attempt == 1]
            assert queue.tenant_tokens(name) == sum(entry.tokens for entry in first_attempts)
            assert queue.tenant_requests(name) == len(first_attempts)
        waits = {e.request.tenant for e in waiting if e.request.attempt == 1} | {"b"}
        assert queue.share("b", WEIGHTS["b"]) == pytest.approx(1 / sum(WEIGHTS[name] for name in waits))
    assert sorted(id(serve(queue)) for _ in list(waiting)) == sorted(map(id, waiting))
    assert queue.first() is None


def test_many_cancels_leave_no_memory_behind() -> None:
    queue = FairQueue()
    keep = item("a")
    queue.append(keep, 1.0)
    for _ in range(5_000):
        gone = item("a")
        queue.append(gone, 1.0)
        queue.cancel(gone)
    assert sum(len(line.items) for line in queue._lines.values()) <= 1_100
    assert serve(queue) is keep


@given(st.lists(st.tuples(TENANTS, COSTS), max_size=80), TENANTS, COSTS)
def test_what_is_ahead_is_estimated_from_above(
    entries: list[tuple[str, int]], tenant: str, cost: int
) -> None:
    queue = FairQueue()
    for name, tokens in entries:
        queue.append(item(name, tokens), WEIGHTS[name])
    estimate = queue.tokens_ahead(tenant, WEIGHTS[tenant], cost)
    last = item(tenant, cost)
    queue.append(last, WEIGHTS[tenant])
    ahead = 0
    while (first := serve(queue)) is not last:
        ahead += first.tokens
    # Requests are not cut: each tenant may be one of them ahead of the fluid model.
    slack = sum(max((t for n, t in entries if n == name), default=0) for name in WEIGHTS)
    assert ahead <= estimate + slack + cost * max(WEIGHTS.values())


@given(st.lists(st.tuples(TENANTS, COSTS), min_size=1, max_size=60), st.integers(1, 20))
def test_nothing_starves_inside_a_class(entries: list[tuple[str, int]], flood: int) -> None:
    """Whoever waits is served, though others never stop coming, and before they got more than their share."""
    queue = FairQueue()
    mine = item("a", 50)
    for name, tokens in entries:
        queue.append(item(name, tokens), WEIGHTS[name])
    queue.append(mine, WEIGHTS["a"])
    bound = queue.num_requests + 10 * 50 * 100
    for _ in range(bound):
        for n in range(flood % 3 + 1):
            queue.append(item("bc"[n % 2], 100), WEIGHTS["bc"[n % 2]])
        if serve(queue) is mine:
            return
    raise AssertionError("it waits for ever")


def test_the_longest_wait_is_of_what_still_waits() -> None:
    queue = FairQueue()
    early, late = item("a"), item("b")
    late.queued_at = 40
    retry = item("a", attempt=2)
    assert queue.longest_wait_ms(100) == 0
    for entry in (early, late, retry):
        queue.append(entry, 1.0)
    assert queue.longest_wait_ms(100) == 100
    queue.cancel(early)
    assert queue.longest_wait_ms(100) == 60
    queue.cancel(late)
    assert queue.longest_wait_ms(100) == 0  # a retry that no worker may take says nothing of the load
