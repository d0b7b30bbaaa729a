import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import topics
from schemas.priority import PriorityClass

TENANTS = st.from_regex(topics.TENANT_NAME, fullmatch=True)


@given(st.integers(0, 10_000), st.sampled_from(PriorityClass))
def test_partition_gives_shard_and_class_back(shard: int, priority: PriorityClass) -> None:
    partition = topics.partition(shard, priority)
    assert topics.shard_of(partition) == shard
    assert topics.priority_of(partition) is priority
    assert partition % 3 == priority


@given(TENANTS, st.sampled_from(PriorityClass), st.integers(1, 64))
def test_a_tenants_partition_lies_in_its_shard(tenant: str, priority: PriorityClass, shards: int) -> None:
    partition = topics.tenant_partition(tenant, priority, shards)
    assert 0 <= partition < shards * 3
    assert topics.shard_of(partition) == topics.tenant_shard(tenant, shards)


def test_the_tenant_hash_never_changes() -> None:
    # Tenants would move to other partitions, and their limits with them.
    known = {"demo": 32, "acme": 1, "a": 47, "tenant-7": 22}
    assert {tenant: topics.tenant_shard(tenant, 64) for tenant in known} == known


def test_priority_order_is_the_order_of_service() -> None:
    assert [c.label for c in sorted(PriorityClass)] == ["interactive", "free", "batch"]


def test_unknown_priority_lists_the_names() -> None:
    with pytest.raises(ValueError, match="interactive, free, batch"):
        PriorityClass.parse("vip")


@pytest.mark.parametrize("name", ["", "A", "a_b", "a.b", "a" * 41, "ä", "a\n"])
def test_bad_tenant_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="tenant name"):
        topics.batch_requests(name)


@given(TENANTS)
def test_batch_topics_name_their_tenant(tenant: str) -> None:
    assert topics.tenant_of_batch_topic(topics.batch_requests(tenant)) == tenant
    assert topics.tenant_of_batch_topic(topics.batch_results(tenant)) is None
    assert topics.tenant_of_batch_topic(topics.dlq(topics.batch_requests(tenant))) is None


def test_layout_counts_partitions() -> None:
    layout = topics.Layout(shards=4, worker_slots=2, gateway_slots=6)
    counts = {spec.name: spec.partitions for spec in topics.topic_specs(layout)}
    assert counts[topics.REQUESTS] == counts[topics.USAGE] == counts[topics.CANCELLATIONS] == 12
    assert counts[topics.PREFILL] == counts[topics.DECODE] == 6
    assert counts[topics.TOKENS] == 18
    assert counts[topics.HEARTBEATS] == counts[topics.EVENTS] == 1


def test_all_topics_keep_the_brokers_time_and_close_segments_within_retention() -> None:
    layout = topics.Layout()
    for spec in [*topics.topic_specs(layout), *topics.tenant_topic_specs("demo", layout)]:
        assert spec.config["message.timestamp.type"] == "LogAppendTime"
        if spec.config["cleanup.policy"] == "delete":
            assert int(spec.config["segment.ms"]) < int(spec.config["retention.ms"])


@pytest.mark.parametrize("bad", [{"shards": 0}, {"worker_slots": 0}, {"replication": 1, "min_isr": 2}])
def test_impossible_layouts_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(reversed(bad))):
        topics.Layout(**bad)
