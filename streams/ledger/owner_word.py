"""What a coordinator says of its request in the log: another attempt, or the end. Pure.

Either counts when it is read back and nothing else was first.
"""

from dataclasses import dataclass

from schemas.records import Claim, Failed, Retry
from streams.ledger.batch_actions import Action, Append
from streams.ledger.open_request import OpenRequest, Phase

MAX_RETRIES = 3


@dataclass(frozen=True, slots=True)
class OwnerWord:
    """Of the coordinator that has `slot`, in the life of `epoch`."""

    slot: int
    epoch: int

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
