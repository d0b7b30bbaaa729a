"""Whose line goes next: tenants by weight, jobs by expiry, none while a model or a tenant has to wait."""

from collections import Counter

import pytest

from schemas.fleet import FleetView
from schemas.records import BatchJob, Heartbeat, PartitionStatus, QueuedTokens, Tenant
from streams.ledger import job_feeding
from streams.ledger.batch_actions import AdmissionOffsets
from streams.ledger.batch_item import BatchItem, FileSource, make_item
from streams.ledger.batch_outcome import CANCELLED
from streams.ledger.file_lines import item_request_id
from streams.ledger.job import FileJob
from streams.ledger.job_feeding import (
    MAX_OPEN_OF_JOB,
    MAX_QUEUED_TOKENS,
    MAX_UNREAD,
    RESERVED_OF_TENANT,
    Feeder,
    RunningJob,
    Unserved,
    in_prefix_order,
    next_to_run,
    queued_tokens,
)
from streams.ledger.job_lines import BadLine
from tests.batch_world import MODELS, World, dispatched

HOUR = 3_600_000


def make_item_of(tenant: str, batch_id: str, index: int, prompt: str = "hi") -> BatchItem:
    source = FileSource(tenant, batch_id, index, f"n{index}")
    body = {"model": "simulated", "prompt": prompt, "max_tokens": 7}
    return make_item(source, item_request_id(batch_id, index), 0, "/v1/generate", body, MODELS, None)


def make_running(tenant: str, batch_id: str = "b", hours: int = 24, lines: int = 1_000) -> RunningJob:
    asked = BatchJob(batch_id, tenant, "openai", "file-x", None, None, hours * HOUR, 0)
    return RunningJob(FileJob(asked, None, 1), [make_item_of(tenant, batch_id, 0)] * lines)


def fed(
    feeder: Feeder,
    jobs: list[RunningJob],
    count: int,
    *,
    weights: dict[str, float] | None = None,
    paused: dict[str, int] | None = None,
    full: bool = False,
    now_ms: int = 0,
) -> list[str]:
    tenants = {
        running.job.tenant: Tenant(
            running.job.tenant, 2, [], [], (weights or {}).get(running.job.tenant, 1.0)
        )
        for running in jobs
        if running.job.tenant != "disabled"
    }
    said = []
    for _ in range(count):
        running = feeder.choose(jobs, tenants, paused or {}, lambda model: full, now_ms)
        if running is None:
            break
        line = feeder.take(running, tenants[running.job.tenant].weight if tenants else 1.0)
        running.sent += isinstance(line, BatchItem)
        said.append(f"{running.job.tenant}/{running.job.batch_id}")
    return said


def test_tenants_take_turns_by_weight() -> None:
    jobs = [make_running("a"), make_running("b")]
    assert Counter(fed(Feeder(), jobs, 40)) == {"a/b": 20, "b/b": 20}
    jobs = [make_running("a"), make_running("b")]
    assert Counter(fed(Feeder(), jobs, 40, weights={"a": 3.0})) == {"a/b": 30, "b/b": 10}


def test_who_comes_later_has_no_claim_to_what_went_before() -> None:
    feeder, first = Feeder(), make_running("a")
    fed(feeder, [first], 200)
    assert Counter(fed(feeder, [first, make_running("b")], 20)) == {"a/b": 10, "b/b": 10}


def test_inside_a_tenant_the_job_that_expires_first_goes_first() -> None:
    jobs = [make_running("a", "late", 24), make_running("a", "soon", 1, lines=3)]
    assert fed(Feeder(), jobs, 5) == ["a/soon"] * 3 + ["a/late"] * 2


def test_a_job_and_the_shard_are_bounded_and_others_have_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_running("a", lines=MAX_OPEN_OF_JOB + 9)
    assert len(fed(Feeder(), [job], 2_000)) == MAX_OPEN_OF_JOB
    monkeypatch.setattr(job_feeding, "MAX_OPEN", 100)
    stuck, other = make_running("a", lines=300), make_running("b", lines=300)
    feeder = Feeder()
    assert len(fed(feeder, [stuck], 300)) == 100
    assert fed(feeder, [stuck, other], 300) == ["b/b"] * RESERVED_OF_TENANT


def test_nothing_is_sent_of_a_model_or_a_tenant_that_has_to_wait() -> None:
    feeder = Feeder()
    assert not fed(feeder, [make_running("a")], 1, full=True)
    assert not fed(feeder, [make_running("disabled")], 1)
    jobs = [make_running("a"), make_running("b")]
    assert set(fed(feeder, jobs, 9, paused={"a": 100}, now_ms=99)) == {"b/b"}
    assert set(fed(feeder, jobs, 9, paused={"a": 100}, now_ms=100)) == {"a/b", "b/b"}


def test_what_is_answered_here_waits_for_nobody() -> None:
    stopped, bad = make_running("disabled"), make_running("disabled", lines=0)
    stopped.stopped = CANCELLED
    bad.window = [BadLine(FileSource("disabled", "b", 0, "n0"), bytes(16), CANCELLED)]
    assert len(fed(Feeder(), [stopped], 2_000, full=True)) == 1_000
    assert len(fed(Feeder(), [bad], 2, full=True)) == 1


def test_those_that_begin_alike_follow_one_another() -> None:
    prompts = ["one b", "two b", "one a", "two a", "one b"]
    lines = [make_item_of("a", "b", i, prompt) for i, prompt in enumerate(prompts)]
    bad = BadLine(FileSource("a", "b", 9, "n9"), bytes(16), CANCELLED)
    ordered = in_prefix_order([*lines[:2], bad, *lines[2:]])
    assert ordered[-1] is bad
    said = [line.source.index for line in reversed(ordered) if isinstance(line.source, FileSource)]
    assert said[0] == 9
    assert sorted(said[2:4] + said[1:2]) == [0, 2, 4]
    assert sorted(said[4:]) == [1, 3]


def test_what_waits_in_admission_is_told_by_who_took_the_partition_last() -> None:
    fleet = FleetView()
    for slot, takeover, tokens in ((0, 10, 5), (1, 20, 7)):
        queued = [QueuedTokens("m", 2, tokens), QueuedTokens("m", 0, 999)]
        status = PartitionStatus(5, takeover, 30, queued)
        fleet.on_heartbeat(Heartbeat("admission", slot, 1, b"n", partitions=[status]), 1_000)
    assert queued_tokens(fleet, 5) == {"m": 7}
    assert queued_tokens(fleet, 2) == {}


def test_what_was_sent_since_admission_last_said_counts_at_once() -> None:
    item = make_item_of("a", "b", 0)
    each = item.num_tokens
    world = World()
    for index in range(3):
        world.accept(make_item_of("a", "b", index))
    said = AdmissionOffsets(takeover=0, read=0)
    unserved = Unserved.of(world.shard.requests(), said, {"simulated": each, "other": 5})
    assert (unserved.tokens, unserved.unread) == ({"simulated": 3 * each, "other": 5}, 3)

    world.say(dispatched(world.requests[1]))
    unserved = Unserved.of(world.shard.requests(), AdmissionOffsets(0, read=1), {"simulated": 9 * each})
    assert (unserved.tokens["simulated"], unserved.unread) == (9 * each, 1)


def test_no_more_is_sent_than_admission_reads_and_than_may_wait() -> None:
    item = make_item_of("a", "b", 0)
    unserved = Unserved()
    for _ in range(MAX_UNREAD):
        assert not unserved.is_full("simulated")
        unserved.add(item)
    assert unserved.is_full("simulated")
    assert unserved.is_full("another")

    unserved = Unserved(Counter({"simulated": MAX_QUEUED_TOKENS + 1}))
    assert unserved.is_full("simulated")
    assert not unserved.is_full("another")


def test_turns_go_to_the_tenant_with_the_fewest() -> None:
    running = [make_running("a").job, make_running("b").job, make_running("a").job]
    waiting = [make_running("a", "1", 1).job, make_running("b", "2", 24).job, make_running("b", "3", 2).job]
    chosen = next_to_run(waiting, running)
    assert chosen is not None
    assert chosen.batch_id == "3"
    assert next_to_run([], running) is None
