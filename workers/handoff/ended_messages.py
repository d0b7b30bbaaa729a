"""How one side tells the other that a transfer is over. Pure."""

from schemas.priority import PriorityClass
from schemas.records import Reserved, TransferEnded
from schemas.stream_state import Run
from workers.handoff.effects import Send
from workers.handoff.states import State
from workers.handoff.transfer import Transfer


def ended(transfer: Transfer, run: Run, *, writes_closed: bool = False, may_land: bool = False) -> Send:
    """From `run`, to the transfer's other side."""
    record = TransferEnded(
        transfer.transfer_id,
        transfer.request_id,
        transfer.attempt,
        run.slot,
        run.epoch,
        transfer.peer.slot,
        transfer.peer.epoch,
        transfer.state.value,
        writes_closed,
        may_land,
        transfer.reason,
    )
    return Send(transfer.peer.slot, transfer.priority, record)


# Why, of a transfer that prefill does not know: what became of it, this does not say.
UNKNOWN = "unknown"


def unknown(about: Reserved | TransferEnded, run: Run, to: Run) -> Send:
    """For a transfer that prefill does not know, or not any more: it writes nothing. How it ended it does not
    know either."""
    record = TransferEnded(
        about.transfer_id,
        about.request_id,
        about.attempt,
        run.slot,
        run.epoch,
        to.slot,
        to.epoch,
        State.ABORTED.value,
        True,
        True,
        UNKNOWN,
    )
    return Send(to.slot, PriorityClass.INTERACTIVE, record)
