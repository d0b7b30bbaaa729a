"""How long somebody waits for a request, and how long it goes on with nobody (architecture §4). Pure."""

import re
from collections.abc import Mapping

from gateway.owned_request import OwnedRequest
from schemas.api.errors import bad_field
from schemas.fleet import FleetView

_HEADER = b"x-headrace-detach"
_START_HEADER = b"x-headrace-start"
_MAX_START_S = 86_400
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,3})?")


def detach_ms(headers: Mapping[bytes, bytes], most_s: float, unnamed_s: float = 0.0) -> int:
    """How long the request shall go on unread: `unnamed_s` without the header. Raises ApiError 400."""
    text = headers.get(_HEADER)
    if text is None:
        return int(min(unnamed_s, most_s) * 1000)
    if not _SECONDS.fullmatch(text) or float(text) > most_s:
        raise bad_field("X-Headrace-Detach", f"seconds from 0 to {most_s:g}, not {text[:40]!r}")
    return int(float(text) * 1000)


def start_ms(headers: Mapping[bytes, bytes]) -> int | None:
    """How long the client waits for the first token; None if it does not say. Raises ApiError 400."""
    text = headers.get(_START_HEADER)
    if text is None:
        return None
    if not _SECONDS.fullmatch(text) or not 0 < float(text) <= _MAX_START_S:
        raise bad_field("X-Headrace-Start", f"seconds from 0.001 to {_MAX_START_S}, not {text[:40]!r}")
    return int(float(text) * 1000)


def abandoned(owned: OwnedRequest, view: FleetView, clock_ms: int) -> bool:
    """Nobody has read for as long as the request may go on so. `clock_ms`: the log's clock, now.

    Readers are counted by their gateways' Attach and Detach; those of a gateway that is gone do not count.
    """
    state = owned.state
    if clock_ms < owned.kept_until:
        return False
    if owned.reader is not None or any(view.gone("gateway", *reader) is None for reader in state.readers):
        owned.unread_clock = None
        return False
    if owned.unread_clock is None:
        owned.unread_clock = clock_ms
    return clock_ms - owned.unread_clock >= max(owned.detach_ms, state.detach_ms)
