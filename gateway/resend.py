"""When a request goes to admission once more: decided by offsets (architecture §4). Pure."""

from collections.abc import Iterable

from schemas.fleet import FleetView
from schemas.records import PartitionStatus

NO_ANSWER_MS = 1_000
MAX_RESENDS = 3


def should_send_again(
    offset: int, admitted_offset: int | None, status: PartitionStatus, since_read_ms: int
) -> bool:
    """The same attempt must go to admission once more; for a request without a run.

    Decided by offsets. An admission process that took the partition over skipped what lies before its
    takeover offset. What it has read and not answered for 1 s was lost on the way.
    `since_read_ms`: log clock since its read offset was first seen above `offset`.
    """
    if status.takeover_offset > offset:
        return True
    answered = admitted_offset is not None and admitted_offset >= offset
    return status.read_offset > offset and not answered and since_read_ms >= NO_ANSWER_MS


def admission_status(view: FleetView) -> dict[int, PartitionStatus]:
    """Per partition the word of who took it over last."""
    found: dict[int, PartitionStatus] = {}
    for member in view.live("admission"):
        statuses: Iterable[PartitionStatus] = () if member.heartbeat is None else member.heartbeat.partitions
        for status in statuses:
            known = found.get(status.partition)
            if known is None or status.takeover_offset >= known.takeover_offset:
                found[status.partition] = status
    return found
