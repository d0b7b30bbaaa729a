"""A request that workers die of again and again must not take others with it (architecture §4). Pure."""

from collections.abc import Iterable

from gateway.owned_request import OwnedRequest
from schemas.fleet import FleetView

SUSPECT_LOSSES = 2


def lost_epochs(owned: OwnedRequest, view: FleetView) -> list[int]:
    """The runs that are over, of those that were lost with it: admission may hear of it later than we do."""
    return [run.epoch for run in owned.state.lost if view.gone("worker", run.slot, run.epoch) is not None]


def excluded_slots(owned: OwnedRequest, open_requests: Iterable[OwnedRequest], view: FleetView) -> list[int]:
    """Where the next attempt of `owned` must not run: with another suspect, once two runs were lost under it.

    Not where the model would have no other worker: one that is shut out by mistake fares worse than one that
    may be taken along.
    """
    if len(owned.state.lost) < SUSPECT_LOSSES:
        return []
    hosts = {
        other.state.run.slot
        for other in open_requests
        if other is not owned and other.state.run is not None and len(other.state.lost) >= SUSPECT_LOSSES
    }
    serving = {
        member.slot
        for member in view.live("worker")
        if member.heartbeat is not None
        and member.heartbeat.worker is not None
        and member.heartbeat.worker.model == owned.request.model
    }
    return sorted(hosts) if serving - hosts else []
