"""Admission's decisions: limits, queues, routing. Pure: time is an argument, what to do is the result.

A request is validated, passes its tenant's limits, and waits in the queue of its model and class until
the router finds a worker with room; mostly that is at once. Every event that may make room (a heartbeat,
a usage row, a worker that joins) runs the queues again.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from schemas.fleet import FleetView
from schemas.records import (
    Cancellation,
    Duplicate,
    InferenceRequest,
    PartitionStatus,
    Tenant,
    Usage,
)
from schemas.stream_state import DEADLINE_EXCEEDED
from streams.admission.actions import (
    Action,
    Announce,
    AnnouncePool,
    Assign,
    NoteKey,
    Reply,
    dispatched,
    reply_to,
)
from streams.admission.affinity import HitMeter
from streams.admission.backlog import Backlog
from streams.admission.budgets import Budgets
from streams.admission.decisions import DecisionLog
from streams.admission.fallback import Fallback, FallbackPolicy
from streams.admission.idempotency import IdempotencyKeys
from streams.admission.limits import Limits
from streams.admission.memory import Phase, RequestMemory
from streams.admission.overload import Overload
from streams.admission.placement import Placement
from streams.admission.prediction import OutputPredictor
from streams.admission.refusal import RETRY_LATER_MS, Refusal
from streams.admission.refusing import Refusing
from streams.admission.restating import Restating, settle_usage
from streams.admission.router import Router, RoutingPolicy
from streams.admission.screening import Refused, Screening
from streams.admission.shares import PeerDemand
from streams.admission.takeover import Takeover
from streams.admission.tenants import Tenants
from streams.admission.validation import invalid_field, oversized
from streams.admission.waiting import WaitingPolicy, expired, wait_until

# Finish reasons of answers that came to their own end, so that their length says something.
COMPLETE = frozenset({"stop", "length"})


class Admission:
    """One process's state. Every method that returns actions expects them carried out in order.

    `fleet` is fed from outside; `fleet_changed` follows, once a batch.
    """

    def __init__(
        self,
        policy: WaitingPolicy,
        decisions: DecisionLog,
        predictor: OutputPredictor | None = None,
        routing: RoutingPolicy | None = None,
        slot: int = 0,
        fallback: FallbackPolicy | None = None,
    ) -> None:
        self.policy = policy
        self.decisions = decisions
        self.fleet = FleetView()
        self.takeover = Takeover()
        self.limits = Limits()
        self.restating = Restating(self.limits)
        self.tenants = Tenants(self.limits)
        self.budgets = Budgets(self.tenants)
        self.router = Router(routing)
        self.peers = PeerDemand(slot)
        self.hits = HitMeter()
        self.predictor = predictor or OutputPredictor()
        self.keys = IdempotencyKeys()
        self._backlog = Backlog(self.router, self.peers)
        self._memory = RequestMemory()
        self.overload = Overload(policy.overload, self._backlog, self.router)
        self.fallback = Fallback(
            fallback or FallbackPolicy(),
            decisions,
            self.tenants,
            self.router,
            self._backlog,
            self.overload,
            self.predictor,
        )
        self._screening = Screening(
            policy,
            decisions,
            self.tenants,
            self.budgets,
            self.limits,
            self.router,
            self.overload,
            self.predictor,
            self.keys,
        )

        self._refusing = Refusing(self.limits, self.keys, decisions, self._backlog, self._memory)
        self._placement = Placement(
            policy,
            decisions,
            self.tenants,
            self.router,
            self.overload,
            self._backlog,
            self._memory,
            self._refusing,
        )

    # Records

    def on_request(
        self,
        request: InferenceRequest,
        record: bytes,
        partition: int,
        offset: int,
        traceparent: str | None,
        now: int,
    ) -> list[Action]:
        """A request that `takeover` accepted; `record` is what it was decoded from."""
        if invalid := invalid_field(request, partition):
            return [self._refusing.refuse(request, Refusal(400, "invalid_request", invalid), traceparent)]
        known = self._memory.get(request.request_id)
        if known is not None and request.attempt <= known.attempt:
            # The owner sent it again. What was dispatched it shall hear again, what waits it will hear.
            if request.attempt < known.attempt or known.phase is not Phase.DISPATCHED:
                return []
            left = self.limits.rate_limits(request.tenant, request.priority, now)
            run, at, granted = (known.slot, known.epoch), (partition, offset), known.granted_max_tokens
            served = replace(request, model=known.model)
            return [dispatched(served, *run, *at, traceparent, left, granted, known.prefill)]
        if known is not None and known.queued is not None:
            self._backlog.cancel(known.queued)
            self._memory.forget(request.request_id)
        if self.router.reservations:  # an earlier attempt is over
            self.router.reservations.release(request.request_id)
        asked, request = request, self.fallback.redirect(request, now)
        # The record is passed on as it came, unless it is for another model now.
        record = record if request is asked else b""
        item = self._screening.screen(request, record, partition, offset, traceparent, now)
        if isinstance(item, Duplicate):
            return [Reply(reply_to(request), item, traceparent)]
        if isinstance(item, Refused):
            return [self._refusing.refuse(request, item.refusal, traceparent, now, item.inputs)]
        queue = self._backlog.append(item, self.tenants.weight(request.tenant))
        self._memory.queued(item)
        if request.attempt > 1:
            self.decisions.requeued(item)
        actions = self._placement.run(request.model, now)
        if item.waits:
            actions.append(self._placement.wait(queue, item, now))
        return actions

    def on_cancel(self, cancellation: Cancellation, partition: int, now: int) -> list[Action]:
        """Ends a request that waits. One that was dispatched is its worker's to cancel."""
        actions: list[Action] = []
        known = self._memory.get(cancellation.request_id)
        covered = known is not None and known.attempt <= cancellation.attempt and cancellation.slot is None
        if covered and known is not None and known.queued is not None:
            refusal = Refusal(499, "cancelled", cancellation.reason)
            if cancellation.reason == DEADLINE_EXCEEDED:
                message = f"not finished within {known.queued.request.end_ms / 1000:g} s"
                refusal = Refusal(499, DEADLINE_EXCEEDED, message)
            actions.append(self._refusing.evict(known.queued, refusal, now))
        if cancellation.key is not None:
            freed = self.keys.free(cancellation.key, cancellation.request_id)
            actions += [] if freed is None else [NoteKey(freed, partition)]
        return actions

    def on_usage(self, usage: Usage, now: int, partition: int | None = None) -> list[Action]:
        """Settles the request's reservation; its place at the worker is free. `partition`: where it lies."""
        used = usage.input_tokens + usage.output_tokens
        if partition is None or not self.restating.keep(usage, partition):
            settle_usage(self.limits, usage, usage.ended_at, now, partition)
        if usage.finish_reason in COMPLETE:
            self.predictor.observe(usage.tenant, usage.model, usage.output_tokens)
        if usage.slot is None or usage.epoch is None:
            return []
        self.router.billed(usage.slot, usage.epoch, usage.request_id)
        if not self._memory.ended(usage.request_id, usage.attempt, usage.slot, usage.epoch):
            return []
        self.router.ended(usage.slot, usage.epoch, usage.priority, used)
        known = self._memory.get(usage.request_id)
        self.overload.ended(usage, known)
        if known is not None and usage.attempt == 1:
            self.hits.note(known.predicted_cached_tokens, usage.cached_tokens)
        return self._placement.run(usage.model, now)

    def on_tenant(self, name: str, tenant: Tenant | None, now: int) -> None:
        self.tenants.put(name, tenant, now)

    def on_other_admission(self, statuses: Iterable[PartitionStatus], now: int) -> list[int]:
        """Another process says what it holds; returns the partitions that this one lost by it."""
        lost = [s.partition for s in statuses if self.takeover.heard(s.partition, s.takeover_offset)]
        if lost:
            self._drop_partitions(lost)
            self.restating.hold(self.takeover.held(), now)
        return lost

    def fleet_changed(self, now: int) -> list[Action]:
        """Takes the fleet's newest figures and runs all queues."""
        self.peers.retain(self.fleet.live_slots("admission"))
        self.router.update(self.fleet.live("worker"))
        changes, self.router.changes = self.router.changes, []
        return [*map(AnnouncePool, changes), *self._placement.run_all(now)]

    def on_assigned(self, end_offsets: Mapping[int, int], now: int) -> None:
        """The partitions that this process now holds, with their end offsets.

        What waits from partitions that went is dropped without a word: their new holder announces its
        takeover and the owners send again.
        """
        self._drop_partitions(self.takeover.assign(end_offsets))
        self.restating.hold(self.takeover.held(), now)

    def on_dispatched(self, assign: Assign, offset: int) -> list[Action]:
        """The Dispatch was acked at `offset` of its mailbox partition."""
        assign.worker.acked(assign.in_flight, offset)
        request = assign.dispatch.request
        known = self._memory.dispatched(request.request_id, request.attempt)
        granted = None if known is None else known.granted_max_tokens
        run, prefill = (assign.dispatch.slot, assign.dispatch.epoch), None
        if (pairing := assign.dispatch.pairing) is not None:
            run, prefill = (pairing.decode_slot, pairing.decode_epoch), run
        at, trace, left = (assign.partition, assign.offset), assign.traceparent, assign.rate_limits
        return [dispatched(request, *run, *at, trace, left, granted, prefill)]

    def on_dispatch_failed(
        self, assign: Assign, reason: str, now: int, *, too_large: bool = False
    ) -> list[Action]:
        """The Dispatch was not acked. If it lies there after all, its run is a stray: owners cancel it.

        One that is `too_large` for its topic is so for every worker.
        """
        request = assign.dispatch.request
        assign.worker.remove(assign.in_flight)
        self.router.reservations.release(request.request_id, request.attempt)
        self._memory.forget(request.request_id, request.attempt)
        if request.attempt == 1:
            self.limits.release(request.request_id, now)
        actions: list[Action] = []
        asked = request.idempotency
        if asked is not None and request.attempt == 1:
            freed = self.keys.free(asked.key, request.request_id)
            actions += [] if freed is None else [NoteKey(freed, assign.partition)]
        refusal = Refusal(503, "dispatch_failed", f"the dispatch failed: {reason}", RETRY_LATER_MS)
        if too_large:
            refusal = oversized(request)
        elif now >= wait_until(self.policy, request):
            refusal = expired(RETRY_LATER_MS)
        return [
            *actions,
            self._refusing.refuse(request, refusal, assign.traceparent),
            *self._placement.run_all(now),
        ]

    def tick(self, now: int) -> list[Action]:
        """What time alone brings: waits that end, reservations that expire. Call about every 100 ms."""
        self.limits.expire(now)
        self._memory.expire(now)
        self.keys.expire(now)
        self.router.reservations.expire(now)
        actions: list[Action] = []
        for change in self.overload.update(now):
            self.decisions.level_changed(change)
            actions += [Announce(change), *self._placement.run(change.model, now)]
        return actions + self._placement.overdue(now)

    # Figures

    def partition_statuses(self) -> list[PartitionStatus]:
        """For the heartbeat: what each partition held has read and queued."""
        return [
            PartitionStatus(
                partition, *self.takeover.offsets(partition), self._backlog.queued_tokens(partition)
            )
            for partition in self.takeover.partitions()
        ]

    @property
    def num_workers(self) -> int:
        """Workers that live, draining ones included."""
        return self.router.num_workers

    def num_queued(self, priority: int) -> int:
        """Requests that wait in a class, over all models."""
        return self._backlog.num_requests(priority)

    # Inside

    def _drop_partitions(self, partitions: Collection[int]) -> None:
        self.keys.drop(partitions)
        for item in self._backlog.of_partitions(set(partitions)):
            self._backlog.cancel(item)
            self._memory.forget(item.request.request_id, item.request.attempt)
        self.limits.drop(partitions)
