"""What admission's heartbeats say of the partitions of inference.requests. Pure."""

from schemas.fleet import FleetView
from streams.ledger.batch_actions import AdmissionOffsets


def admission_offsets(fleet: FleetView) -> dict[int, AdmissionOffsets]:
    """By partition. While two say they hold one, the later takeover counts."""
    found: dict[int, AdmissionOffsets] = {}
    for member in fleet.live("admission"):
        if member.heartbeat is None:
            continue
        for status in member.heartbeat.partitions:
            said = AdmissionOffsets(status.takeover_offset, status.read_offset)
            known = found.get(status.partition)
            if known is None or said.takeover > known.takeover:
                found[status.partition] = said
    return found
