from typing import Any

from schemas.fleet import FleetView, Member
from schemas.records import Drain, Heartbeat, InferenceRequest, Join, Left
from streams.admission.router import Blocked, Router
from streams.admission.worker import Worker
from tests.admission_harness import MODEL, make_request, make_status


def member(slot: int = 0, epoch: int = 10, **status: Any) -> Member:
    heartbeat = Heartbeat("worker", slot, epoch, b"", worker=make_status(**status))
    return Member("worker", slot, epoch, 0, heartbeat)


def choose(router: Router, expected: int = 16, **request: Any) -> Worker | Blocked:
    return router.choose(make_request(**request), expected)


def chosen(router: Router, **request: Any) -> int | Blocked:
    worker = choose(router, **request)
    return worker.slot if isinstance(worker, Worker) else worker


def dispatch(router: Router, offset: int | None, **request: Any) -> None:
    made = make_request(**request)
    worker = router.choose(made, 16)
    assert isinstance(worker, Worker)
    entry = router.dispatch(worker, made, 16)
    if offset is not None:
        worker.acked(entry, offset)


def test_takes_no_worker_of_another_model_draining_failed_or_excluded() -> None:
    router = Router()
    router.update(
        [
            member(0, model="other"),
            member(1, draining=True),
            member(2, canary="failed"),
            Member("worker", 3, 10, 0, member(3).heartbeat, draining=True),
            member(4),
            member(5, canary="engine_stalled"),
        ]
    )
    assert chosen(router) == 4
    assert chosen(router, excluded_slots=[4]) is Blocked.NO_WORKER
    assert chosen(router, lost_epochs=[9, 10]) is Blocked.NO_WORKER  # its owner knows that this run is over
    assert chosen(router, lost_epochs=[9]) == 4
    assert chosen(router, model="third") is Blocked.NO_WORKER


def test_a_stalled_worker_is_taken_again_once_its_step_has_ended() -> None:
    router = Router()
    router.update([member(0, canary="engine_stalled")])
    assert chosen(router) is Blocked.NO_WORKER
    router.update([member(0, canary="ok")])
    assert chosen(router) == 0


def test_prefers_free_blocks_then_short_prefill_queues() -> None:
    router = Router()
    router.update([member(0, free_blocks=500), member(1, free_blocks=900)])
    assert chosen(router) == 1
    router.update([member(0, queued_prefill_tokens=4_000), member(1, free_blocks=900)])
    assert chosen(router) == 1


def test_spreads_what_it_dispatches_between_heartbeats() -> None:
    router = Router()
    router.update([member(0), member(1)])
    for offset in range(8):
        dispatch(router, offset)
    assert [worker.in_flight_seqs for worker in router.workers(MODEL)] == [4, 4]


def test_room_is_counted_with_what_is_in_flight() -> None:
    router = Router()
    status: dict[str, Any] = {"max_num_seqs": 3, "num_running": 1}
    router.update([member(**status)])
    dispatch(router, 0)
    dispatch(router, None)
    assert chosen(router) is Blocked.NO_ROOM
    # The next heartbeat has read the first: it is among those that wait there now.
    router.update([member(**status, num_waiting=[1, 0, 0], mailbox_offsets=[1, 0, 0])])
    assert chosen(router) is Blocked.NO_ROOM
    router.update([member(max_num_seqs=3, num_running=1, mailbox_offsets=[1, 0, 0])])
    assert chosen(router) == 0


def test_blocks_in_flight_and_promised_to_waiting_prompts_are_not_free() -> None:
    router = Router()
    router.update([member(free_blocks=6, num_blocks=6)])
    big: dict[str, Any] = {"prompt_token_ids": [1] * 48}  # 48 + 16 tokens: 4 blocks
    dispatch(router, 0, **big)
    assert chosen(router, **big) is Blocked.NO_ROOM
    assert chosen(router) == 0  # 10 + 16 tokens: 2 blocks
    router.update([member(free_blocks=6, num_blocks=6, queued_prefill_tokens=48, mailbox_offsets=[1, 0, 0])])
    assert chosen(router, **big) is Blocked.NO_ROOM


def test_an_ack_that_comes_after_the_heartbeat_counts_nothing_twice() -> None:
    router = Router()
    router.update([member()])
    request = make_request()
    worker = router.choose(request, 16)
    assert isinstance(worker, Worker)
    entry = router.dispatch(worker, request, 16)
    router.update([member(num_running=1, mailbox_offsets=[1, 0, 0])])
    worker.acked(entry, 0)
    assert worker.num_seqs == 1
    assert worker.in_flight_blocks == worker.in_flight_prefill == 0


def test_what_ended_makes_room_before_the_next_heartbeat() -> None:
    router = Router()
    full: dict[str, Any] = {"max_num_seqs": 1, "num_running": 1, "free_blocks": 998}
    router.update([member(**full)])
    assert chosen(router) is Blocked.NO_ROOM
    router.ended(0, 9, 0, 26)  # an earlier life of the slot
    assert chosen(router) is Blocked.NO_ROOM
    router.ended(0, 10, 0, 26)
    worker = choose(router)
    assert isinstance(worker, Worker)
    assert worker.free_blocks == 1_000
    router.update([member(**full)])
    assert chosen(router) is Blocked.NO_ROOM


def test_requests_that_runs_were_lost_under_are_kept_apart_while_there_is_room() -> None:
    router = Router()
    members = [member(0), member(1, queued_prefill_tokens=1_600)]  # the first has less to do
    router.update(members)
    first, second = make_request(attempt=3), make_request(attempt=3)

    def where(request: InferenceRequest) -> int:
        found = router.choose(request, 16)
        assert isinstance(found, Worker)
        return found.slot

    assert where(first) == where(second) == 0
    worker = router.choose(first, 16)
    assert isinstance(worker, Worker)
    router.dispatch(worker, first, 16)
    assert where(second) == 1
    assert where(first) == where(make_request(attempt=2)) == 0
    router.update(members[:1])
    assert where(second) == 0  # there is no other
    router.update(members)
    router.billed(0, 10, first.request_id)
    assert where(second) == 0


def test_a_new_epoch_starts_without_what_was_in_flight() -> None:
    router = Router()
    router.update([member(max_num_seqs=1)])
    dispatch(router, 0)
    assert chosen(router) is Blocked.NO_ROOM
    router.update([member(epoch=11, max_num_seqs=1)])
    assert chosen(router) == 0
    router.update([])
    assert chosen(router) is Blocked.NO_WORKER


def test_what_could_never_run_there_finds_no_worker() -> None:
    router = Router()
    router.update([member(num_blocks=4, free_blocks=4, max_model_len=100)])
    assert (
        chosen(router, prompt_token_ids=[1] * 49, max_tokens=16) == 0
    )  # 64 tokens hold KV, the last needs none
    assert chosen(router, prompt_token_ids=[1] * 50, max_tokens=16) is Blocked.NO_WORKER
    router.update([member(max_model_len=100)])
    assert chosen(router, prompt_token_ids=[1] * 99, max_tokens=500) == 0
    assert chosen(router, prompt_token_ids=[1] * 100, max_tokens=1) is Blocked.NO_WORKER


def test_follows_the_fleet_view() -> None:
    view, router = FleetView(), Router()
    view.on_event(Join("worker", 0, b""), 10)
    router.update(view.live("worker"))
    assert chosen(router) is Blocked.NO_WORKER  # no figures yet
    view.on_heartbeat(Heartbeat("worker", 0, 10, b"", worker=make_status()), 1_000)
    router.update(view.live("worker"))
    assert chosen(router) == 0
    view.on_event(Drain("worker", 0, 10), 11)
    router.update(view.live("worker"))
    assert (chosen(router), router.num_workers) == (Blocked.NO_WORKER, 1)
    view.on_event(Left("worker", 0, 10, "killed"), 12)
    router.update(view.live("worker"))
    assert router.num_workers == 0
