"""The log of decisions with the figures they saw, for replay and audit. Nothing waits for it."""

from collections import deque

from schemas.records import Decision, InferenceRequest
from streams.admission.fair_queue import QueuedRequest
from streams.admission.refusal import Refusal
from streams.admission.worker import InFlight, Worker


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

    def dispatched(self, item: QueuedRequest, worker: Worker, entry: InFlight, queued_ms: int) -> None:
        if not self.enabled:
            return
        inputs = {
            "queued_ms": float(queued_ms),
            "tokens": float(item.tokens),
            "expected_output_tokens": float(item.expected_output_tokens),
            "load": worker.load,
            "cached_tokens": float(entry.cached_tokens),
            "free_blocks": float(worker.free_blocks),
            "num_seqs": float(worker.num_seqs),
        }
        self._add(item.request, "dispatch", "room", inputs, worker.slot, worker.epoch)

    def refused(self, request: InferenceRequest, refusal: Refusal) -> None:
        if not self.enabled:
            return
        inputs = {"status": float(refusal.status)}
        if refusal.retry_after_ms is not None:
            inputs["retry_after_ms"] = float(refusal.retry_after_ms)
        self._add(request, "reject", refusal.code, inputs)

    def _add(
        self,
        request: InferenceRequest,
        action: str,
        reason: str,
        inputs: dict[str, float],
        slot: int | None = None,
        epoch: int | None = None,
    ) -> None:
        if len(self._held) == self._held.maxlen:
            self.num_lost += 1
        self._held.append(
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
