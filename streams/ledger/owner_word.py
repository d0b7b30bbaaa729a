"""What a coordinator says of its requests in the log: another attempt, or the end. Pure.

Either counts when it is read back and nothing else was first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.api.errors import ApiError
from schemas.records import Claim, Failed, Retry
from streams.ledger.batch_actions import Action, Append
from streams.ledger.open_request import OpenRequest, Phase

MAX_RETRIES = 3


@dataclass(frozen=True, slots=True)
class OwnerWord:
    """Of the coordinator that has `slot`, in the life of `epoch`."""

    slot: int
    epoch: int

    def claims(self, epochs: Iterable[int]) -> list[Action]:
        """To all that is open of these lives."""
        return [
            Append(Claim(from_epoch=epoch, by_slot=self.slot, by_epoch=self.epoch))
            for epoch in sorted(epochs)
            if epoch != self.epoch
        ]

    def retry(self, request: OpenRequest, reason: str) -> list[Action]:
        """The end, where it was tried often enough."""
        attempt = request.state.attempt
        if attempt > MAX_RETRIES:
            message = f"gave up after {MAX_RETRIES} retries; the last one: {reason}"
            return self.fail(request, "worker_lost", message)
        retry = Retry(request.item.request_id, attempt + 1, self.epoch, reason)
        return self._say(request, retry, Phase.RETRYING)

    def fail(self, request: OpenRequest, code: str, message: str) -> list[Action]:
        failed = Failed(request.item.request_id, request.state.attempt, self.epoch, code, message)
        return self._say(request, failed, Phase.FAILING)

    def end(self, request: OpenRequest, error: ApiError) -> list[Action]:
        """Of what no run is known to have, but may: the log says the end, and whatever has it stops."""
        word = self.fail(request, error.code, error.message)
        return [*word, request.stop(error.code, behind_request=True)]

    def stop(self, requests: Iterable[OpenRequest], error: ApiError, now_ms: int) -> list[Action]:
        """Ends those not stopped yet: with their answer where that comes first, else with `error`."""
        actions: list[Action] = []
        for request in requests:
            if request.stopped is not None:
                continue
            request.stopped, request.stopped_at = error, now_ms
            if request.phase is Phase.WAITING:
                actions += self.end(request, error)
            else:
                actions.append(request.stop(error.code, behind_request=request.state.run is None))
        return actions

    def _say(self, request: OpenRequest, record: Retry | Failed, phase: Phase) -> list[Action]:
        if request.phase is Phase.WAITING:
            request.transition_to(Phase.SENT)
        request.transition_to(phase)
        actions: list[Action] = [Append(record)]
        owner = request.state.owner_epoch
        if owner not in (None, self.epoch):
            assert owner is not None
            actions.insert(0, Append(Claim(owner, self.slot, self.epoch, record.request_id)))
        return actions
