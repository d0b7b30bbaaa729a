"""Requests in fleets of unified, prefill and decode workers: which slots, what is kept at decode, and till
when."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.fleet import Member
from schemas.handoff_records import WorkerRole
from schemas.records import InferenceRequest, KVLayout
from streams.admission.choice import RoutingPolicy
from streams.admission.hop import HopPolicy
from streams.admission.pairing import Route, Way, kv_bytes_per_token
from streams.admission.router import Blocked, PoolChange, Router
from streams.admission.shares import Share
from tests.admission_harness import MODEL, make_request
from tests.unit.test_admission_router import member

LAYOUT = KVLayout(16, "bfloat16", 1, 32, 8, 128)
LONG = [1] * 600
PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def prefill(slot: int, **status: Any) -> Member:
    return member(slot, **{"worker_role": PREFILL, "kv_layout": LAYOUT, **status})


def decode(slot: int, **status: Any) -> Member:
    busy = {"num_running": 4, "max_num_seqs": 64}
    return member(slot, **{"worker_role": DECODE, "kv_layout": LAYOUT, **busy, **status})


def router_of(*members: Member, **hop: Any) -> Router:
    router = Router(RoutingPolicy(hop=HopPolicy(**hop)))
    router.update(members)
    return router


def route(router: Router, expected: int = 16, **request: Any) -> Route:
    found = router.route(make_request(**{"prompt_token_ids": LONG, **request}), expected)
    assert isinstance(found, Route)
    return found


def slots(router: Router, **request: Any) -> tuple[str, int, int | None]:
    found = route(router, **request)
    return found.way.value, found.worker.slot, None if found.decode is None else found.decode.slot


def dispatch(router: Router, expires_at: int = 1_000, **request: Any) -> tuple[InferenceRequest, Route]:
    made = make_request(**{"prompt_token_ids": LONG, **request})
    found = router.route(made, 16)
    assert isinstance(found, Route)
    router.dispatch_along(found, made, 16, None, expires_at)
    return made, found


def test_a_long_prompt_takes_the_least_loaded_prefill_slot_and_the_freest_decode_slot() -> None:
    router = router_of(
        prefill(0, queued_prefill_tokens=500),
        prefill(1),
        decode(2, free_blocks=100),
        decode(3, free_blocks=900),
        decode(4, num_running=60),
    )
    assert slots(router) == ("handoff", 1, 3)


def test_a_short_prompt_is_computed_where_it_is_decoded() -> None:
    router = router_of(prefill(0), decode(1))
    assert slots(router, prompt_token_ids=[1, 2, 3]) == ("short", 1, None)
    assert slots(router) == ("handoff", 0, 1)


def test_places_at_decode_are_taken_before_prefill_hears_of_it() -> None:
    router = router_of(prefill(0), decode(1, num_running=1, max_num_seqs=3), spill=False)
    _, found = dispatch(router)
    assert found.decode is not None
    assert (found.decode.num_seqs, found.decode.reserved_blocks) == (2, -(-616 // 16))
    assert found.decode.free_blocks == 1_000 - found.decode.reserved_blocks
    # At prefill it holds its prompt and the first token, and no seat for what comes after.
    assert found.worker.in_flight_blocks == -(-601 // 16)
    dispatch(router)
    assert found.decode.num_seqs == 3
    assert router.route(make_request(prompt_token_ids=LONG), 16) is Blocked.NO_ROOM


def test_a_place_is_the_heartbeats_from_the_one_on_that_counts_it() -> None:
    router = router_of(prefill(0), decode(1))
    request, found = dispatch(router)
    assert found.decode is not None
    router.update([prefill(0), decode(1)])
    assert len(found.decode.reserved) == 1
    counted = decode(1, num_running=5, free_blocks=961, handoffs=[request.request_id])
    router.update([prefill(0), counted])
    assert not found.decode.reserved
    assert (found.decode.num_seqs, found.decode.free_blocks) == (5, 961)


@pytest.mark.parametrize("how", ["ended", "expired", "prefill_gone", "decode_gone", "prefill_again", "retry"])
def test_a_place_is_given_back(how: str) -> None:
    router = router_of(prefill(0), decode(1), prefill(2, queued_prefill_tokens=900))
    request, found = dispatch(router, expires_at=500)
    assert found.decode is not None
    assert len(router.reservations) == 1
    match how:
        case "ended":
            router.billed(1, 10, request.request_id)
        case "expired":
            router.reservations.expire(499)
            assert len(router.reservations) == 1
            router.reservations.expire(500)
        case "prefill_gone":
            router.update([decode(1), prefill(2)])
        case "decode_gone":
            router.update([prefill(0), prefill(2)])
        case "prefill_again":
            newer = prefill(0)
            newer.epoch = 11
            router.update([newer, decode(1), prefill(2)])
        case "retry":
            router.reservations.release(request.request_id, attempt=2)
            assert len(router.reservations) == 1
            router.reservations.release(request.request_id, attempt=1)
    assert len(router.reservations) == 0
    assert not found.decode.reserved
    assert found.decode.reserved_blocks == 0


@pytest.mark.parametrize(("lone", "missing"), [(prefill, DECODE), (decode, PREFILL)])
def test_if_one_pool_is_gone_the_other_serves_whole_requests_and_says_so(
    lone: Any, missing: WorkerRole
) -> None:
    router = router_of(prefill(0), decode(1))
    assert router.changes == []
    router.update([lone(2)])
    assert router.changes == [PoolChange(MODEL, missing, True)]
    assert slots(router) == ("unpaired", 2, None)
    assert slots(router, prompt_token_ids=[1]) == ("unpaired", 2, None)
    dispatch(router)
    assert router.ways == {Way.UNPAIRED: 1}
    router.changes.clear()
    router.update([prefill(0), decode(1), lone(2)])
    assert router.changes == [PoolChange(MODEL, missing, False)]
    assert list(router.pool_states()) == [(MODEL, missing, False)]


def test_in_a_mixed_fleet_the_cheapest_way_is_taken_of_those_with_room() -> None:
    unified = member(2)
    router = router_of(prefill(0), decode(1), unified)
    assert slots(router) == ("unified", 2, None)  # idle: nobody is held up, nothing handed over
    router.update([prefill(0), decode(1), member(2, num_running=4, max_num_seqs=64)])
    assert slots(router) == ("handoff", 0, 1)
    router.update([prefill(0), decode(1, free_blocks=0), member(2, num_running=4, max_num_seqs=64)])
    assert slots(router) == ("unified", 2, None)


def test_one_pool_spills_into_the_other_unless_requests_are_to_wait() -> None:
    full = prefill(0, num_running=8)
    # Idle, it holds nobody up; with streams it would, and what waits at prefill is done sooner.
    assert slots(router_of(full, decode(1, num_running=0))) == ("spill", 1, None)
    assert router_of(full, decode(1)).route(make_request(prompt_token_ids=LONG), 16) is Blocked.NO_ROOM
    late = prefill(0, num_running=8, num_waiting=[3, 0, 0], queued_prefill_tokens=900)
    assert slots(router_of(late, decode(1))) == ("spill", 1, None)
    no_blocks = decode(1, free_blocks=0)
    assert slots(router_of(prefill(0), no_blocks)) == ("spill", 0, None)
    for members in ([late, decode(1)], [full, decode(1, num_running=0)], [prefill(0), no_blocks]):
        router = router_of(*members, spill=False)
        assert router.route(make_request(prompt_token_ids=LONG), 16) is Blocked.NO_ROOM


def test_a_pool_that_can_never_serve_the_request_is_none() -> None:
    small = prefill(0, num_blocks=10, free_blocks=10)
    assert slots(router_of(small, decode(1), spill=False)) == ("spill", 1, None)
    router = router_of(prefill(0), decode(1), spill=False)
    assert slots(router, excluded_slots=[0]) == ("spill", 1, None)
    assert slots(router, excluded_slots=[1]) == ("spill", 0, None)
    assert router.route(make_request(excluded_slots=[0, 1]), 16) is Blocked.NO_WORKER
    # Prefill holds prompts alone: what is too long with its output goes by there all the same.
    short = prefill(0, num_blocks=40, free_blocks=40)
    assert slots(router_of(short, decode(1)), max_tokens=400) == ("handoff", 0, 1)


def test_only_slots_whose_kv_fits_are_paired() -> None:
    other = replace(LAYOUT, dtype="float16")
    router = router_of(prefill(0), decode(1, kv_layout=other))
    assert router.changes == [PoolChange(MODEL, DECODE, True), PoolChange(MODEL, PREFILL, True)]
    assert route(router).way is Way.UNPAIRED
    # Block sizes and tensor-parallel degrees are converted.
    converted = replace(LAYOUT, block_size=32, tp_degree=4)
    assert slots(router_of(prefill(0), decode(1, kv_layout=converted))) == ("handoff", 0, 1)
    # Who tells no layout takes part in no handoff.
    assert route(router_of(prefill(0, kv_layout=None), decode(1, kv_layout=None))).way is Way.UNPAIRED


def test_two_processes_share_the_places_at_decode() -> None:
    fast = {"max_num_seqs": 64, "prefill_tokens_per_s": 1e6}
    taken = []
    for share in (Share(0, 100, 200), Share(100, 100, 200)):
        router = router_of(prefill(0, **fast), decode(1, num_running=4, max_num_seqs=12), spill=False)
        for _ in range(20):
            request = make_request(prompt_token_ids=LONG)
            found = router.route(request, 16, None, share)
            if isinstance(found, Blocked):
                break
            router.dispatch_along(found, request, 16, None, 1_000)
        taken.append(len(router.reservations))
    assert taken == [4, 4]


def test_switched_off_roles_mean_nothing() -> None:
    router = router_of(prefill(0), decode(1), enabled=False)
    assert route(router).way is Way.UNIFIED
    assert router.ways == {}
    assert router.changes == []


def test_kv_bytes_of_a_token() -> None:
    assert kv_bytes_per_token(KVLayout(16, "bfloat16", 8, 80, 8, 128)) == 327_680
    assert kv_bytes_per_token(None) == 0
