"""Where requests with a common beginning go, and requests that their client says belong together."""

from collections import Counter
from typing import Any

from schemas.prefix_sketch import make_sketch, prefix_keys
from schemas.records import Heartbeat, InferenceRequest
from streams.admission.affinity import HitMeter, PromptPrefix, SentPrefixes, rendezvous
from streams.admission.router import MAX_SLOWNESS, Router, RoutingPolicy
from streams.admission.worker import Worker
from tests.admission_harness import MODEL, make_request, make_status
from tests.unit.test_admission_router import member

SYSTEM = list(range(1_000, 1_512))
NO_CACHE = make_sketch([], shared=False)


def sketch_of(tokens: list[int], tenant: str = "demo", shared: bool = False) -> bytes:
    return make_sketch(prefix_keys(tokens, "" if shared else tenant), shared=shared)


def send(router: Router, request: InferenceRequest) -> Worker:
    prefix = PromptPrefix(request)
    worker = router.choose(request, 16, prefix)
    assert isinstance(worker, Worker)
    router.dispatch(worker, request, 16, prefix)
    return worker


def asks(*tail: int, **fields: Any) -> InferenceRequest:
    return make_request(prompt_token_ids=[*SYSTEM, *tail], **fields)


def big(slot: int, **status: Any) -> Any:
    return member(
        slot,
        **{
            "max_num_seqs": 100,
            "num_blocks": 100_000,
            "free_blocks": 100_000,
            "prefix_sketch": NO_CACHE,
            **status,
        },
    )


def test_goes_where_its_beginning_is_cached() -> None:
    router = Router()
    router.update([big(0), big(1), big(2, prefix_sketch=sketch_of(SYSTEM))])
    worker = send(router, asks(1))
    assert worker.slot == 2
    assert worker.in_flight_prefill == 1
    assert worker.in_flight[0][0].cached_tokens == 512


def test_another_tenants_cache_is_of_no_use_unless_all_share() -> None:
    router = Router()
    request = asks(1)
    router.update([big(0), big(1, prefix_sketch=sketch_of(SYSTEM, "other"))])
    for worker in router.workers(MODEL):
        assert worker.cached_tokens(PromptPrefix(request)) == 0
    router.update([big(0), big(1, prefix_sketch=sketch_of(SYSTEM, shared=True))])
    assert [w.cached_tokens(PromptPrefix(request)) for w in router.workers(MODEL)] == [0, 512]


def test_what_was_just_sent_there_counts_before_the_worker_says_so() -> None:
    router = Router()
    router.update([big(slot) for slot in range(4)])
    first = send(router, asks(1))
    assert {send(router, asks(n)).slot for n in range(2, 6)} == {first.slot}
    assert [entry.cached_tokens for entry in first.in_flight[0]] == [0, 512, 512, 512, 512]


def test_what_was_sent_is_forgotten_when_the_worker_does_not_confirm_it() -> None:
    router = Router()
    router.update([big(0)])
    worker = send(router, asks(1))
    assert len(worker.sent) > 0
    for _ in range(7):
        router.update([big(0, prefix_sketch=make_sketch([], shared=False))])
    assert worker.cached_tokens(PromptPrefix(asks(1))) == 512
    router.update([big(0, prefix_sketch=make_sketch([], shared=False))])
    assert worker.cached_tokens(PromptPrefix(asks(1))) == 0
    assert len(worker.sent) == 0


def test_a_heartbeat_without_news_of_the_cache_ages_nothing() -> None:
    router = Router()
    router.update([big(0)])
    worker = send(router, asks(1))
    for _ in range(20):
        router.update([big(0)])
    assert worker.cached_tokens(PromptPrefix(asks(1))) == 512


def test_affinity_ends_where_the_favourite_has_more_to_do_than_a_hit_saves() -> None:
    router = Router()
    hit = sketch_of(SYSTEM)
    router.update([big(0, prefix_sketch=hit, queued_prefill_tokens=900), big(1)])
    assert send(router, asks(1)).slot == 0
    router.update([big(0, prefix_sketch=hit, queued_prefill_tokens=1_300), big(1)])
    assert send(router, asks(2)).slot == 1


def test_a_prefix_that_all_share_does_not_fill_one_worker_first() -> None:
    prompt = list(range(1_536))
    hit = sketch_of(prompt)
    taken = {}
    for cap in (0.5, 10.0):
        router = Router(RoutingPolicy(max_affinity=cap))
        running = Counter({0: 1})
        for _ in range(6):  # heartbeats, each when all prompts so far are computed
            router.update(
                big(
                    slot,
                    num_running=running[slot],
                    prefix_sketch=hit if running[slot] else NO_CACHE,
                    mailbox_offsets=[1_000, 0, 0],
                )
                for slot in range(4)
            )
            for _ in range(16):
                request = make_request(prompt_token_ids=[*prompt, 1])
                worker = send(router, request)
                worker.acked(worker.in_flight[0][-1], 0)
                running[worker.slot] += 1
        taken[cap] = running
    assert max(taken[10.0].values()) == 97
    assert max(taken[0.5].values()) <= 66
    assert len(taken[0.5]) > 1  # as many workers as it takes keep the prefix


def test_without_affinity_the_load_alone_decides() -> None:
    router = Router(RoutingPolicy(affinity=False))
    router.update([big(0, num_running=1), big(1, num_running=2, prefix_sketch=sketch_of(SYSTEM))])
    assert send(router, asks(1)).slot == 0


def test_a_worker_without_a_prefix_cache_is_never_expected_to_hit() -> None:
    router = Router()
    router.update([big(0, prefix_sketch=b""), big(1, prefix_sketch=b"of another version")])
    for n in range(3):
        send(router, asks(n))
    assert sum(entry.cached_tokens for w in router.workers(MODEL) for entry in w.in_flight[0]) == 0


def test_hints_bring_together_what_is_near_equal_and_spread_what_differs() -> None:
    router = Router()
    router.update([big(slot) for slot in range(8)])
    chosen: dict[int, set[int]] = {}
    for affinity in range(50):
        for _ in range(2):
            request = make_request(affinity=affinity)
            worker = router.choose(request, 16, PromptPrefix(request))
            assert isinstance(worker, Worker)
            chosen.setdefault(affinity, set()).add(worker.slot)
    assert all(len(slots) == 1 for slots in chosen.values())
    assert len(set.union(*chosen.values())) == 8
    router.update([big(slot, num_running=20) for slot in range(7)] + [big(7)])
    assert all(send(router, make_request(affinity=n)).slot == 7 for n in range(5))


def test_a_worker_that_goes_moves_only_its_own_hints() -> None:
    before = {hint: max(range(8), key=lambda s, h=hint: rendezvous(h, s)) for hint in range(500)}  # type: ignore[misc]
    after = {hint: max(range(7), key=lambda s, h=hint: rendezvous(h, s)) for hint in range(500)}  # type: ignore[misc]
    assert all(after[hint] == slot for hint, slot in before.items() if slot != 7)
    assert 30 < sum(slot == 7 for slot in before.values()) < 100


def test_a_slow_worker_gets_less() -> None:
    router = Router()
    slow = {"prefill_tokens_per_s": 250.0, "step_time_ms": 20.0}
    router.update([big(0, **slow), *(big(slot) for slot in range(1, 4))])
    assert router.workers(MODEL)[0].prefill_slowness == router.workers(MODEL)[0].step_slowness == 4.0
    taken = Counter(send(router, make_request(prompt_token_ids=[1] * 50)).slot for _ in range(130))
    assert 0 < taken[0] < 20
    assert min(taken[slot] for slot in range(1, 4)) > 30


def test_one_that_has_no_figures_yet_is_tried_and_a_step_that_hangs_counts_as_slow() -> None:
    router = Router()
    router.update([big(0, prefill_tokens_per_s=0.0, step_time_ms=0.0), big(1), big(2, step_age_ms=4_000)])
    fresh, normal, hanging = router.workers(MODEL)
    assert fresh.prefill_slowness == fresh.step_slowness == normal.step_slowness == 1.0
    assert hanging.step_slowness == MAX_SLOWNESS


def test_memory_of_what_was_sent_is_bounded() -> None:
    sent = SentPrefixes()
    for n in range(1_000):
        sent.add(list(range(10 * n, 10 * n + 10)))
    assert len(sent) == 4_096
    assert 9_999 in sent
    assert 0 not in sent


def test_hits_are_metered_both_ways() -> None:
    meter = HitMeter()
    meter.note(500, 512)
    meter.note(500, 0)
    assert (meter.predicted, meter.actual, meter.missed, meter.unforeseen) == (1_000, 512, 500, 12)


def test_ids_that_are_none_do_not_stop_the_router() -> None:
    router = Router()
    router.update([big(0), big(1)])
    send(router, make_request(prompt_token_ids=[-1] * 100))


def test_what_others_dispatched_since_the_heartbeat_takes_room() -> None:
    router = Router()
    router.update([member(max_num_seqs=4)])
    (worker,) = router.workers(MODEL)
    entry = router.dispatch(worker, make_request(), 16)
    worker.acked(entry, 2)  # 0 and 1 are another process's
    assert (worker.unseen_seqs, worker.num_seqs) == (2, 3)
    assert worker.free_blocks == 1_000 - 3 * entry.blocks
    heartbeat = Heartbeat("worker", 0, 10, b"", worker=make_status(num_running=3, mailbox_offsets=[3, 0, 0]))
    assert heartbeat.worker is not None
    worker.update(heartbeat, heartbeat.worker, 1)
    assert (worker.unseen_seqs, worker.num_seqs, worker.in_flight_prefill) == (0, 3, 0)
