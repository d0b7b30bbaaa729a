"""The log of decisions with the figures they saw, for replay and audit. Nothing waits for it."""

from collections import deque
from collections.abc import Mapping

from schemas.records import Decision, InferenceRequest
from streams.admission.arrival import Arrival
from streams.admission.fair_queue import QueuedRequest
from streams.admission.in_flight import InFlight
from streams.admission.pairing import Route, Way
from streams.admission.refusal import Refusal
from streams.admission.room import Part
from streams.admission.router import Router
from streams.admission.shedding import LevelChange, ShedLevel

# Of more workers the least loaded tell enough of what else there was.
MAX_CANDIDATES = 4


class DecisionLog:
    """Holds at most `capacity` decisions; when it is full the oldest are lost and counted in `num_lost`."""

    def __init__(self, enabled: bool = True, capacity: int = 10_000) -> None:
        self.enabled = enabled
        self.num_lost = 0
        self._held: deque[Decision] = deque(maxlen=capacity)

    def drain(self) -> list[Decision]:
        """All that are held, oldest first."""
        held = list(self._held)
        self._held.clear()
        return held

    def candidates(self, item: QueuedRequest, route: Route, router: Router) -> dict[str, float]:
        """What the router could choose from, and chose; to be asked before it counts the request. Of a
        handoff it is the prefill slot that was chosen among others, and figures of its own are the decode
        slot's."""
        if not self.enabled or len(router.workers(item.request.model)) < 2:
            return {}
        figures: dict[str, float] = {}
        chosen, part = route.worker, Part.WHOLE if route.decode is None else Part.PREFILL
        found = router.candidates(item, MAX_CANDIDATES, router.rivals(route, item.request.model), part)
        for worker in found if chosen in found else [*found, chosen]:
            cached = worker.cached_tokens(item.prefix)
            name = f"slot_{worker.slot}_"
            figures[name + "load"] = worker.load
            figures[name + "cached_tokens"] = float(cached)
            figures[name + "slowness"] = worker.prefill_slowness
            num_tokens = len(item.request.prompt_token_ids) - cached
            if (ms := worker.prefill_ms(item.request.priority, num_tokens)) is not None:
                figures[name + "prefill_ms"] = ms
        if (decode := route.decode) is not None:
            figures["decode_slot"] = float(decode.slot)
            figures["decode_load"] = decode.load
            figures["decode_free_blocks"] = float(decode.free_blocks)
            figures["decode_num_seqs"] = float(decode.num_seqs)
        return figures

    def dispatched(
        self,
        item: QueuedRequest,
        route: Route,
        entry: InFlight,
        queued_ms: int,
        prefill_ms: float | None,
        candidates: Mapping[str, float],
    ) -> None:
        """The route's worker counts it already, as `entry`; `prefill_ms` is what its prefill is expected to
        take. Its `seen` tells why it goes by two slots, or does not."""
        if not self.enabled:
            return
        worker = route.worker
        status = worker.status
        inputs = {
            **_arrived(item),
            **candidates,
            **item.prefix.seen(),
            "queued_ms": float(queued_ms),
            "tokens": float(item.tokens),
            "granted_max_tokens": float(item.request.sampling.max_tokens),
            "cached_tokens": float(entry.cached_tokens),
            "worker_load": worker.load,
            "worker_free_blocks": float(worker.free_blocks),
            "worker_num_blocks": float(status.num_blocks),
            "worker_num_seqs": float(worker.num_seqs),
            "worker_max_num_seqs": float(status.max_num_seqs),
            "worker_queued_prefill_tokens": float(status.queued_prefill_tokens + worker.in_flight_prefill),
            "worker_prefill_tokens_per_s": status.prefill_tokens_per_s,
            "worker_decode_tokens_per_s": status.decode_tokens_per_s,
            "worker_step_time_ms": status.step_time_ms,
        }
        taken = worker.num_seqs > status.max_num_seqs or worker.free_blocks < 0
        if taken and (lower := worker.lower(item.request.priority)) is not None:
            inputs["worker_lower_class_seqs"] = float(lower.num_seqs)
            inputs["worker_lower_class_blocks"] = float(lower.blocks)
        if prefill_ms is not None:
            inputs["worker_prefill_ms"] = prefill_ms
        reason = "room" if item.request.attempt == 1 else "retry"
        if route.seen is not None:
            inputs |= route.seen.inputs()
            inputs["hop_taken"] = float(route.way is Way.HANDOFF)
        self._add(item.request, "dispatch", reason, inputs, worker.slot, worker.epoch)

    def refused(self, request: InferenceRequest, refusal: Refusal, inputs: Mapping[str, float]) -> None:
        """It was not let in; `inputs` were seen of it and its tenant."""
        if self.enabled:
            self._add(request, "reject", refusal.code, {**inputs, **_answer(refusal)})

    def evicted(self, item: QueuedRequest, refusal: Refusal, queued_ms: int) -> None:
        """It was let in and waited for `queued_ms`, in vain."""
        if self.enabled:
            inputs = _arrived(item) | _answer(refusal) | {"queued_ms": float(queued_ms)}
            self._add(item.request, "evict", refusal.code, inputs)

    def requeued(self, item: QueuedRequest) -> None:
        """A retry waits again, at the head of its class."""
        if self.enabled:
            inputs = _arrived(item) | {"output_tokens": float(len(item.request.output_token_ids))}
            self._add(item.request, "requeue", "retry", inputs)

    def capped(self, request: InferenceRequest, seen: Arrival, max_tokens: int) -> None:
        """Its answer may be `max_tokens` long, and not what it asked for."""
        if self.enabled:
            inputs = seen.inputs() | {"granted_max_tokens": float(max_tokens)}
            self._add(request, "cap", ShedLevel.CAP_FREE.label, inputs)

    def fell_back(self, request: InferenceRequest, reason: str, wait_ms: float) -> None:
        """It goes to another model than it names, which the next decision tells, for it would wait."""
        if self.enabled:
            self._add(request, "fallback", reason, {"wait_ms": wait_ms})

    def level_changed(self, change: LevelChange) -> None:
        """Of a model, so of no request and no tenant."""
        if not self.enabled:
            return
        inputs = {
            "before": float(change.before),
            "level": float(change.level),
            "class_wait_ms": float(change.wait_ms),
            "kv_use": change.kv_use,
        }
        self._hold(Decision(bytes(16), 0, "", 0, change.model, "shed", change.level.label, inputs))

    def _add(
        self,
        request: InferenceRequest,
        action: str,
        reason: str,
        inputs: dict[str, float],
        slot: int | None = None,
        epoch: int | None = None,
    ) -> None:
        self._hold(
            Decision(
                request.request_id,
                request.attempt,
                request.tenant,
                request.priority,
                request.model,
                action,
                reason,
                inputs,
                slot,
                epoch,
            )
        )

    def _hold(self, decision: Decision) -> None:
        if len(self._held) == self._held.maxlen:
            self.num_lost += 1
        self._held.append(decision)


def _arrived(item: QueuedRequest) -> dict[str, float]:
    return {} if item.arrival is None else item.arrival.inputs()


def _answer(refusal: Refusal) -> dict[str, float]:
    answer = {"status": float(refusal.status)}
    if refusal.retry_after_ms is not None:
        answer["retry_after_ms"] = float(refusal.retry_after_ms)
    return answer
