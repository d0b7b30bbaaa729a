"""Drives an engine through arrivals, cancels and back-pressure, and checks what must hold at every step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.engine_factories import EOS, check_invariants, make_config, make_kv, make_request
from tests.kv_checking_runner import KVCheckingRunner
from workers.batch import PreemptionMode, ScheduledSequence
from workers.engine import Engine
from workers.request import FinishReason, Request, RequestOutput, RequestStatus
from workers.scheduler_config import SchedulerConfig
from workers.simulated_runner import SimulatedRunner
from workers.step_time import num_attended_pairs
from workers.stop_strings import StopStringChecker

# Few tokens, each a letter: short stop strings are met.
VOCAB_SIZE = 12
TOKEN_BYTES = [bytes([ord("a") + token_id]) for token_id in range(VOCAB_SIZE)]


def check_stop_strings(request: Request) -> None:
    """Gives the request the checker that it asks for, unless its output so far holds a stop string."""
    sampling = request.sampling
    if not sampling.stop:
        return
    checker = StopStringChecker(sampling.stop, TOKEN_BYTES, sampling.min_tokens)
    if all(checker.push(token_id) is None for token_id in request.output_token_ids):
        request.stop_checker = checker


@dataclass
class Arrival:
    at_step: int
    request: Request


@dataclass
class Cancel:
    at_step: int
    number: int
    attempt: int


@dataclass
class Pools:
    """Device blocks, host blocks, and who shares prefixes."""

    num_blocks: int
    num_host_blocks: int = 0
    sharing: str = "off"


@dataclass
class Run:
    engine: Engine
    added: list[Request] = field(default_factory=list)
    ends: list[Request] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            told = self.tokens.setdefault(id(output.request), [])
            start = output.request.num_resumed_tokens
            assert output.position == start + len(told)
            told += output.token_ids
            self.seen["stop string"] += output.text_length is not None
            if output.finish_reason:
                self.ends.append(output.request)

    def add(self, request: Request) -> None:
        scheduler = self.engine.scheduler
        known = [r for r in self.added if r.request_id == request.request_id]
        live = [r.attempt for r in known if r.status is not RequestStatus.FINISHED]
        if not live or request.attempt > live[0]:
            self.added.append(request)
            self.seen["resumed"] += bool(request.num_resumed_tokens)
        check_stop_strings(request)
        self.note(scheduler.add_request(request))

    def _num_held(self, scheduled: Sequence[ScheduledSequence], blocked_now: frozenset[int]) -> int:
        """Running decodes that could have gone on."""
        going = {s.request for s in scheduled}
        return sum(
            r not in going
            and r.reply_partition not in blocked_now
            and r.num_tokens - r.num_computed_tokens == 1
            for r in self.engine.scheduler.running
        )

    def step(self, blocked_now: frozenset[int]) -> bool:
        """True if the step did anything."""
        scheduler = self.engine.scheduler
        config = scheduler.config
        waited = {
            r: r.status
            for r in self.added
            if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and r.reply_partition not in blocked_now
        }
        computed = {r: r.num_computed_tokens for r in self.added}
        batch, outputs = self.engine.step(blocked_now)
        total = sum(s.num_scheduled_tokens for s in batch.scheduled)
        assert batch.total_num_scheduled_tokens == total <= config.max_num_batched_tokens
        chunks = [
            (s.request.num_computed_tokens - s.num_scheduled_tokens, s.num_scheduled_tokens)
            for s in batch.scheduled
        ]
        assert batch.num_sampled == sum(s.samples for s in batch.scheduled)
        assert batch.num_context_tokens == sum(before + new for before, new in chunks)
        pairs = sum(num_attended_pairs(before, new - 1) for before, new in chunks)
        assert batch.num_attended_pairs == pairs
        assert len({id(s.request) for s in batch.scheduled}) == len(batch.scheduled) <= config.max_num_seqs
        assert all(0 < s.num_scheduled_tokens <= config.max_prefill_chunk for s in batch.scheduled)
        assert not any(s.request.reply_partition in blocked_now for s in batch.scheduled)
        for preempted in batch.preempted:
            victim, gets = preempted.victim, preempted.for_request
            assert (victim.priority, victim.arrival) > (gets.priority, gets.arrival)
            lost = 0 if preempted.mode is PreemptionMode.SWAP else computed[victim]
            assert preempted.num_tokens_lost == lost
            assert victim not in batch.admitted
            self.seen[f"{preempted.reason} {preempted.mode}"] += 1
        self.seen["swap in"] += bool(batch.swap_in)
        self.seen["held"] += self._num_held(batch.scheduled, blocked_now)
        left_behind = {r: status for r, status in waited.items() if r not in batch.admitted}
        for admitted in batch.admitted:
            for other, status in left_behind.items():
                if self.engine.kv_cache_manager.hasher is not None:
                    continue  # it may be passed over while another one computes its prompt
                assert admitted.priority <= other.priority
                if admitted.priority == other.priority:
                    # Preempted ones are ahead of their class, else the order is that of arrival.
                    assert waited[admitted] is RequestStatus.PREEMPTED or status is RequestStatus.WAITING
                    assert waited[admitted] is not status or admitted.arrival < other.arrival
        self.note(outputs)
        check_invariants(scheduler, self.added)
        return bool(batch.scheduled or batch.preempted)


def run_to_the_end(
    config: SchedulerConfig,
    pools: Pools,
    arriving: Sequence[Arrival],
    cancelling: Sequence[Cancel] = (),
    blocked_at: Mapping[int, frozenset[int]] | None = None,
    unit_s: float = 0.0,
) -> Run:
    """Until nothing is left in the engine. Each request must have ended once, with the tokens that it gets
    alone, and all blocks must be free again."""
    runner = KVCheckingRunner(shared=pools.sharing == "shared", unit_s=unit_s, vocab_size=VOCAB_SIZE)
    kv = make_kv(pools.num_blocks, pools.num_host_blocks, pools.sharing)
    run = Run(Engine(config, runner, kv, {EOS}, clock=runner.clock))
    engine = run.engine
    blocked_at = blocked_at or {}
    last_event = max([a.at_step for a in arriving] + [c.at_step for c in cancelling] + [*blocked_at, 0])
    step = 0
    while step <= last_event or engine.scheduler.has_requests:
        for arrival in arriving:
            if arrival.at_step == step:
                run.add(arrival.request)
        for cancel in cancelling:
            if cancel.at_step == step:
                run.note(engine.abort(make_request(cancel.number).request_id, cancel.attempt))
        progress = run.step(blocked_at.get(step, frozenset()))
        assert progress or step <= last_event or not engine.scheduler.has_requests, "stuck"
        step += 1
        assert step < 20_000

    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    assert engine.host_pool is None or engine.host_pool.num_free_blocks == engine.host_pool.num_blocks
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    assert sorted(map(id, run.ends)) == sorted(map(id, run.added))
    for request in run.added:
        assert request.finish_reason is not None
        assert request.num_cached_tokens <= len(request.prompt_token_ids)
        told = run.tokens[id(request)]
        num_told = len(request.output_token_ids) - request.num_held_tokens
        assert request.output_token_ids[request.num_resumed_tokens : num_told] == told
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert request.num_held_tokens == 0
            assert told == tokens_alone(request, config.max_model_len)
    return run


def tokens_alone(request: Request, max_model_len: int) -> list[int]:
    """What the request gets from a pool without limits and without anybody else."""
    runner = SimulatedRunner(vocab_size=VOCAB_SIZE, first_token_id=2, eos_token_ids={EOS})
    engine = Engine(make_config(max_model_len=max_model_len), runner, make_kv(), {EOS})
    alone = Request(
        request_id=request.request_id,
        attempt=request.attempt,
        priority=request.priority,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        reply_partition=request.reply_partition,
        output_token_ids=request.output_token_ids[: request.num_resumed_tokens],
    )
    check_stop_strings(alone)
    engine.add_request(alone)
    while engine.scheduler.has_requests:
        engine.step()
    return alone.output_token_ids[alone.num_resumed_tokens :]
