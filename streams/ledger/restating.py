"""What a coordinator shard tells an admission process that took its partition over. Pure."""

from collections.abc import Iterable, Mapping

from schemas.priority import PriorityClass
from schemas.records import Restate, RestatedRequest
from schemas.topics import partition
from streams.ledger.batch_actions import Action, AdmissionOffsets, Restated
from streams.ledger.open_request import OpenRequest


class Restater:
    """Answers each takeover once; when nothing runs too, for admission waits for it."""

    def __init__(self, shard: int, epoch: int, end_ms: int) -> None:
        self._shard, self._epoch, self._end_ms = shard, epoch, end_ms
        self._answered: int | None = None

    def answers(
        self, admission: Mapping[int, AdmissionOffsets], requests: Iterable[OpenRequest], now_ms: int
    ) -> list[Action]:
        """`admission`: by partition of inference.requests; the shard's has its number."""
        said = admission.get(partition(self._shard, PriorityClass.BATCH))
        if said is None or said.takeover == self._answered:
            return []
        self._answered = said.takeover
        running = [self._restated(request, now_ms) for request in requests if _is_running(request)]
        return [Restated(Restate("ledger", self._shard, self._epoch, said.takeover, running))]

    def _restated(self, request: OpenRequest, now_ms: int) -> RestatedRequest:
        item = request.item
        return RestatedRequest(
            request_id=item.request_id,
            attempt=request.state.attempt,
            tenant=item.source.tenant,
            priority=PriorityClass.BATCH,
            input_tokens=len(item.prompt_token_ids),
            output_tokens=item.sampling.max_tokens,
            age_ms=max(0, now_ms - item.accepted_at),
            end_ms=item.end_ms or self._end_ms,
        )


def _is_running(request: OpenRequest) -> bool:
    """Admission let it in. What was not dispatched yet is sent again, and let in anew."""
    return request.state.run is not None or request.state.attempt > 1
