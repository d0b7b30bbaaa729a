"""It says what the Prometheus client's own histogram says."""

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from streams.admission.quick_histogram import QuickHistogram

BUCKETS = (-1.0, 0.0, 0.005, 0.25, 10.0, 2500.0)
NAME, DOC = "headrace_test_seconds", "How long it took"


def lines(registry: CollectorRegistry) -> set[str]:
    """All but when each began to count, which the client adds."""
    text = generate_latest(registry).decode()
    return {line for line in text.splitlines() if "_created" not in line}


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(BUCKETS) | st.floats(-5, 5_000)), max_size=40
    )
)
def test_with_labels_as_the_clients_own(seen: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = QuickHistogram(NAME, DOC, ["class"], buckets=BUCKETS, registry=ours)
    reference = Histogram(NAME, DOC, ["class"], buckets=BUCKETS, registry=theirs)
    for label, amount in seen:
        quick.labels(label).observe(amount)
        reference.labels(label).observe(amount)
    assert lines(ours) == lines(theirs)


def test_without_labels_as_the_clients_own() -> None:
    buckets = BUCKETS[1:]  # with those below 0 there is no sum
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = QuickHistogram(NAME, DOC, buckets=buckets, registry=ours).labels()
    reference = Histogram(NAME, DOC, buckets=buckets, registry=theirs)
    for amount in (0.0, 0.005, 0.0051, math.pi, 1e9):
        quick.observe(amount)
        reference.observe(amount)
    assert lines(ours) == lines(theirs)
