"""Random arrivals, cancels, attempts, lengths, back-pressure, pool sizes: what must hold in any of them."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.priority import PriorityClass
from tests.engine_factories import EOS, check_invariants, make_engine, make_request
from workers.engine import Engine
from workers.request import FinishReason, Request, RequestOutput, RequestStatus


@dataclass
class Arrival:
    at_step: int
    request: Request


@dataclass
class Cancel:
    at_step: int
    number: int
    attempt: int


arrivals = st.builds(
    Arrival,
    st.integers(0, 12),
    st.builds(
        make_request,
        st.integers(1, 9),
        prompt_len=st.integers(0, 60),
        max_tokens=st.integers(1, 60),
        attempt=st.integers(1, 3),
        priority=st.sampled_from(PriorityClass),
        reply_partition=st.integers(0, 3),
        output_token_ids=st.just([]) | st.lists(st.integers(EOS, 20), max_size=9),
        stop_token_ids=st.just([]) | st.lists(st.integers(2, 99), min_size=30, max_size=30),
        ignore_eos=st.booleans(),
    ),
)
cancels = st.builds(Cancel, st.integers(0, 20), st.integers(1, 9), st.integers(1, 3))
limits = st.fixed_dictionaries(
    {
        "max_model_len": st.integers(20, 120) | st.just(120),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(8, 200),
        "max_prefill_chunk": st.integers(1, 40),
        "max_num_waiting": st.integers(1, 8),
    }
)
blocked = st.dictionaries(st.integers(0, 15), st.frozensets(st.integers(0, 3)))


@dataclass
class Run:
    engine: Engine
    added: list[Request] = field(default_factory=list)
    ends: list[Request] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            told = self.tokens.setdefault(id(output.request), [])
            start = output.request.num_resumed_tokens
            assert output.position == start + len(told)
            told += output.token_ids
            if output.finish_reason:
                self.ends.append(output.request)

    def add(self, request: Request) -> None:
        scheduler = self.engine.scheduler
        known = [r for r in self.added if r.request_id == request.request_id]
        live = [r.attempt for r in known if r.status is not RequestStatus.FINISHED]
        if not live or request.attempt > live[0]:
            self.added.append(request)
        self.note(scheduler.add_request(request))

    def step(self, blocked_now: frozenset[int]) -> int:
        scheduler = self.engine.scheduler
        config = scheduler.config
        waited = {
            r: r.status
            for r in self.added
            if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and r.reply_partition not in blocked_now
        }
        batch, outputs = self.engine.step(blocked_now)
        total = sum(s.num_scheduled_tokens for s in batch.scheduled)
        assert batch.total_num_scheduled_tokens == total <= config.max_num_batched_tokens
        assert len({id(s.request) for s in batch.scheduled}) == len(batch.scheduled) <= config.max_num_seqs
        assert all(0 < s.num_scheduled_tokens <= config.max_prefill_chunk for s in batch.scheduled)
        assert not any(s.request.reply_partition in blocked_now for s in batch.scheduled)
        left_behind = {r: status for r, status in waited.items() if r not in batch.admitted}
        for admitted in batch.admitted:
            for other, status in left_behind.items():
                assert admitted.priority <= other.priority
                if admitted.priority == other.priority:
                    # Preempted ones are ahead of their class, else the order is that of arrival.
                    assert waited[admitted] is RequestStatus.PREEMPTED or status is RequestStatus.WAITING
                    assert waited[admitted] is not status or admitted.arrival < other.arrival
        self.note(outputs)
        check_invariants(scheduler, self.added)
        return len(batch.scheduled)


@settings(max_examples=150, deadline=None)
@given(st.lists(arrivals, max_size=20), st.lists(cancels, max_size=6), limits, blocked, st.integers(3, 12))
def test_nothing_leaks_every_request_ends_once_and_preemption_changes_no_token(
    arriving: list[Arrival],
    cancelling: list[Cancel],
    limits: dict[str, int],
    blocked_at: dict[int, frozenset[int]],
    num_blocks: int,
) -> None:
    run = Run(make_engine(num_blocks=num_blocks, **limits))
    engine = run.engine
    last_event = max([a.at_step for a in arriving] + [c.at_step for c in cancelling] + [*blocked_at, 0])
    step = 0
    while step <= last_event or engine.scheduler.has_requests:
        for arrival in arriving:
            if arrival.at_step == step:
                run.add(arrival.request)
        for cancel in cancelling:
            if cancel.at_step == step:
                run.note(engine.abort(make_request(cancel.number).request_id, cancel.attempt))
        num_scheduled = run.step(blocked_at.get(step, frozenset()))
        assert num_scheduled or step <= last_event or not engine.scheduler.has_requests, "stuck"
        step += 1
        assert step < 20_000

    assert engine.pool.num_free_blocks == num_blocks
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    assert sorted(map(id, run.ends)) == sorted(map(id, run.added))
    for request in run.added:
        assert request.finish_reason is not None
        told = run.tokens[id(request)]
        assert request.output_token_ids[request.num_resumed_tokens :] == told
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert told == tokens_alone(request, limits["max_model_len"])


def tokens_alone(request: Request, max_model_len: int) -> list[int]:
    """What the request gets from a pool without limits and without anybody else."""
    engine = make_engine(num_blocks=1000, max_model_len=max_model_len)
    alone = Request(
        request_id=request.request_id,
        attempt=request.attempt,
        priority=request.priority,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        reply_partition=request.reply_partition,
        output_token_ids=request.output_token_ids[: request.num_resumed_tokens],
    )
    engine.add_request(alone)
    while engine.scheduler.has_requests:
        engine.step()
    return alone.output_token_ids[alone.num_resumed_tokens :]
