"""What an owner tells an admission process that took a partition over (architecture §4). Pure."""

from collections.abc import Iterable, Mapping

from gateway.actions import Restated
from gateway.owned_request import OwnedRequest
from schemas import topics
from schemas.records import PartitionStatus, Restate, RestatedRequest


class Restater:
    """Answers each takeover once; that of a partition where nothing runs too, for admission waits for it."""

    def __init__(self, slot: int, epoch: int) -> None:
        self._slot = slot
        self._epoch = epoch
        self._answered: dict[int, int] = {}

    def answers(
        self, admission: Mapping[int, PartitionStatus], owned: Iterable[OwnedRequest], now_ms: int
    ) -> list[Restated]:
        """`owned`: what this process owns and has not ended. `now_ms`: ms of the epoch."""
        moved = {
            partition: status.takeover_offset
            for partition, status in admission.items()
            if self._answered.get(partition) != status.takeover_offset
        }
        if not moved:
            return []
        self._answered |= moved
        running: dict[int, list[RestatedRequest]] = {partition: [] for partition in moved}
        for request in owned:
            if request.partition in running and _is_running(request):
                running[request.partition].append(_restated(request, now_ms))
        return [
            Restated(Restate("gateway", self._slot, self._epoch, moved[partition], requests), partition)
            for partition, requests in running.items()
        ]


def _is_running(owned: OwnedRequest) -> bool:
    """Admission let it in. What was not dispatched yet is sent again, and let in anew."""
    return owned.joined is None and (owned.state.run is not None or owned.state.attempt > 1)


def _restated(owned: OwnedRequest, now_ms: int) -> RestatedRequest:
    request = owned.request
    return RestatedRequest(
        request_id=request.request_id,
        attempt=owned.state.attempt,
        tenant=request.tenant,
        priority=topics.priority_of(owned.partition),
        input_tokens=len(request.prompt_token_ids),
        output_tokens=request.sampling.max_tokens,
        age_ms=max(0, now_ms - request.accepted_at),
        end_ms=request.end_ms,
    )
