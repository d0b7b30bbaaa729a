"""What a transfer can be, what can happen to it, and what is then done: the protocol as two tables.

PROTOCOL.md holds the same tables to be read. Pure: whose transfer it is, messages and time are in
prefill_side.py and decode_side.py.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """Of one transfer at one side. `reserved`, `transferring` and `released` are told apart by prefill only,
    `verified` and `adopted` by decode only."""

    OFFERED = "offered"
    RESERVED = "reserved"
    TRANSFERRING = "transferring"
    RECEIVED = "received"
    VERIFIED = "verified"
    ADOPTED = "adopted"
    RELEASED = "released"
    ABORTED = "aborted"
    EXPIRED = "expired"


TERMINAL = frozenset({State.ADOPTED, State.RELEASED, State.ABORTED, State.EXPIRED})


class Event(StrEnum):
    """What happens. Those of the other side come by message, or are read from the fleet's log."""

    # by message
    RESERVED = "reserved"
    HANDED_OFF = "handed off"
    PEER_ADOPTED = "peer adopted"
    PEER_ENDED = "peer ended"
    PEER_CLOSED = "peer closed"
    PEER_BROKE_OFF = "peer broke off"
    # by the fleet's log: the other side's run is over
    PEER_GONE = "peer gone"
    # by the worker itself
    ROOM = "room"
    WRITABLE = "writable"
    WRITTEN = "written"
    CLOSED = "closed"
    CONTENT_OK = "content ok"
    ADOPTED = "adopted"
    FAILED = "failed"
    CANCELLED = "cancelled"
    # by the clock: `landed` when what had been sent before a failure or a death has had the time to land
    LANDED = "landed"
    RESERVE_DEADLINE = "reserve deadline"
    DEADLINE = "deadline"
    ASK_AGAIN = "ask again"


class Action(StrEnum):
    """What is done, in the order of the row.

    `free` ends the transfer's hold on its blocks, or its wait for some, if it has one. `stop writes` lets no
    further call begin and asks for `closed` once none runs. `adopt` gives blocks and request to the engine,
    which is told in order, so it cannot fail: `adopted` follows at once. `fall back` lets decode compute the
    request, or its owner retry it elsewhere where that would be too late.
    """

    SEND_RESERVED = "send Reserved"
    SEND_HANDOFF = "send Handoff"
    SEND_ENDED = "send TransferEnded"
    START_WRITES = "start writes"
    STOP_WRITES = "stop writes"
    STOP_PREFILL = "stop prefill"
    FREE = "free"
    VERIFY = "verify"
    ADOPT = "adopt"
    FALL_BACK = "fall back"
    AWAIT_LANDING = "await landing"


class Row(NamedTuple):
    """The next state, and what is done on the way."""

    state: State
    actions: tuple[Action, ...] = ()


Table = Mapping[State, Mapping[Event, Row]]

_S, _E, _A = State, Event, Action

# Prefill holds its blocks until nothing reads them, and says `writes_closed` only when no call of its own
# runs: the transport's `closed` is the last thing that it says of a transfer (transport.py).
_UNWRITTEN_END = (_A.STOP_PREFILL, _A.FREE, _A.SEND_ENDED)
_WRITING_END = (_A.STOP_PREFILL, _A.STOP_WRITES, _A.SEND_ENDED)


def _prefill_unwritten(state: State) -> dict[Event, Row]:
    """Nothing was written, nothing will be: it ends at once."""
    aborted = Row(_S.ABORTED, _UNWRITTEN_END)
    return {
        _E.RESERVED: Row(state),
        _E.PEER_ADOPTED: Row(state),
        _E.PEER_ENDED: aborted,
        _E.PEER_GONE: aborted,
        _E.WRITABLE: Row(state),
        _E.WRITTEN: Row(state),
        _E.CLOSED: Row(state),
        _E.FAILED: aborted,
        _E.CANCELLED: aborted,
        _E.RESERVE_DEADLINE: Row(state),
        _E.DEADLINE: Row(_S.EXPIRED, _UNWRITTEN_END),
    }


def _prefill_over(state: State) -> dict[Event, Row]:
    """Decode asks until it knows that the writes are closed; `send` says whether they are."""
    asked = Row(state, (_A.SEND_ENDED,))
    stay = {
        _E.PEER_GONE,
        _E.WRITABLE,
        _E.WRITTEN,
        _E.FAILED,
        _E.CANCELLED,
        _E.RESERVE_DEADLINE,
        _E.DEADLINE,
        _E.PEER_ADOPTED,
    }
    return {
        **{event: Row(state) for event in stay},
        _E.RESERVED: asked,
        _E.PEER_ENDED: asked,
        _E.CLOSED: Row(state, (_A.FREE, _A.SEND_ENDED)),
    }


PREFILL: Table = {
    _S.OFFERED: {
        **_prefill_unwritten(_S.OFFERED),
        _E.RESERVED: Row(_S.RESERVED),
        _E.RESERVE_DEADLINE: Row(_S.EXPIRED, _UNWRITTEN_END),
    },
    _S.RESERVED: {
        **_prefill_unwritten(_S.RESERVED),
        _E.WRITABLE: Row(_S.TRANSFERRING, (_A.START_WRITES,)),
    },
    _S.TRANSFERRING: {
        _E.RESERVED: Row(_S.TRANSFERRING),
        _E.PEER_ADOPTED: Row(_S.TRANSFERRING),
        _E.PEER_ENDED: Row(_S.ABORTED, _WRITING_END),
        _E.PEER_GONE: Row(_S.ABORTED, _WRITING_END),
        _E.WRITABLE: Row(_S.TRANSFERRING),
        _E.WRITTEN: Row(_S.RECEIVED, (_A.SEND_HANDOFF,)),
        _E.CLOSED: Row(_S.TRANSFERRING),
        _E.FAILED: Row(_S.ABORTED, _WRITING_END),
        _E.CANCELLED: Row(_S.ABORTED, _WRITING_END),
        _E.RESERVE_DEADLINE: Row(_S.TRANSFERRING),
        _E.DEADLINE: Row(_S.EXPIRED, _WRITING_END),
    },
    # All is written and no call runs. The blocks are kept for nothing but a retry that finds them cached.
    _S.RECEIVED: {
        _E.RESERVED: Row(_S.RECEIVED),
        _E.PEER_ADOPTED: Row(_S.RELEASED, (_A.FREE,)),
        _E.PEER_ENDED: Row(_S.ABORTED, (_A.FREE, _A.SEND_ENDED)),
        _E.PEER_GONE: Row(_S.ABORTED, (_A.FREE,)),
        _E.WRITABLE: Row(_S.RECEIVED),
        _E.WRITTEN: Row(_S.RECEIVED),
        _E.CLOSED: Row(_S.RECEIVED),
        _E.FAILED: Row(_S.RECEIVED),
        _E.CANCELLED: Row(_S.ABORTED, (_A.FREE, _A.SEND_ENDED)),
        _E.RESERVE_DEADLINE: Row(_S.RECEIVED),
        _E.DEADLINE: Row(_S.EXPIRED, (_A.FREE, _A.SEND_ENDED)),
    },
    _S.RELEASED: _prefill_over(_S.RELEASED),
    _S.ABORTED: _prefill_over(_S.ABORTED),
    _S.EXPIRED: _prefill_over(_S.EXPIRED),
}

# Decode gives blocks that prefill was told of back only when no write may land in them any more: prefill has
# said so, has handed off, or its run is over and what it had sent has had the time to land.
_FENCED_END = (_A.FALL_BACK, _A.SEND_ENDED)
_FREE_END = (_A.FREE, _A.FALL_BACK, _A.SEND_ENDED)


def _decode_received(state: State) -> dict[Event, Row]:
    """The writes are closed: whatever becomes of prefill, the bytes are here, and the blocks are free to
    be given back."""
    return {
        _E.ROOM: Row(state),
        _E.HANDED_OFF: Row(state),
        _E.PEER_ENDED: Row(state),
        _E.PEER_CLOSED: Row(state),
        _E.PEER_BROKE_OFF: Row(state),
        _E.PEER_GONE: Row(state),
        _E.LANDED: Row(state),
        _E.CONTENT_OK: Row(state),
        _E.ADOPTED: Row(state),
        _E.FAILED: Row(_S.ABORTED, _FREE_END),
        _E.CANCELLED: Row(_S.ABORTED, (_A.FREE, _A.SEND_ENDED)),
        _E.RESERVE_DEADLINE: Row(state),
        _E.DEADLINE: Row(_S.EXPIRED, _FREE_END),
        _E.ASK_AGAIN: Row(state),
    }


def _decode_over(state: State) -> dict[Event, Row]:
    """Only what says that no write may land still counts."""
    free = Row(state, (_A.FREE,))
    return {
        _E.ROOM: Row(state),  # it crossed the word to give them back, which the engine gets behind it
        _E.HANDED_OFF: Row(state, (_A.FREE, _A.SEND_ENDED)),
        _E.PEER_ENDED: Row(state),
        _E.PEER_CLOSED: free,
        _E.PEER_BROKE_OFF: Row(state, (_A.AWAIT_LANDING,)),
        _E.PEER_GONE: Row(state, (_A.AWAIT_LANDING,)),
        _E.LANDED: free,
        _E.CONTENT_OK: Row(state),
        _E.ADOPTED: Row(state),
        _E.FAILED: Row(state),
        _E.CANCELLED: Row(state),
        _E.RESERVE_DEADLINE: Row(state),
        _E.DEADLINE: Row(state),
        _E.ASK_AGAIN: Row(state, (_A.SEND_ENDED,)),
    }


DECODE: Table = {
    # The request waits for blocks. Prefill knows none, so nothing can land.
    _S.OFFERED: {
        _E.ROOM: Row(_S.RESERVED, (_A.SEND_RESERVED,)),
        _E.HANDED_OFF: Row(_S.ABORTED, _FREE_END),
        _E.PEER_ENDED: Row(_S.ABORTED, _FREE_END),
        _E.PEER_CLOSED: Row(_S.ABORTED, _FREE_END),
        _E.PEER_BROKE_OFF: Row(_S.ABORTED, _FREE_END),
        _E.PEER_GONE: Row(_S.ABORTED, _FREE_END),
        _E.LANDED: Row(_S.OFFERED),
        _E.CONTENT_OK: Row(_S.OFFERED),
        _E.ADOPTED: Row(_S.OFFERED),
        _E.FAILED: Row(_S.ABORTED, _FREE_END),
        _E.CANCELLED: Row(_S.ABORTED, (_A.FREE, _A.SEND_ENDED)),
        _E.RESERVE_DEADLINE: Row(_S.EXPIRED, _FREE_END),
        _E.DEADLINE: Row(_S.EXPIRED, _FREE_END),
        _E.ASK_AGAIN: Row(_S.OFFERED),
    },
    _S.RESERVED: {
        _E.ROOM: Row(_S.RESERVED),
        _E.HANDED_OFF: Row(_S.RECEIVED, (_A.VERIFY,)),
        _E.PEER_ENDED: Row(_S.ABORTED, _FENCED_END),
        _E.PEER_CLOSED: Row(_S.ABORTED, _FREE_END),
        _E.PEER_BROKE_OFF: Row(_S.ABORTED, (_A.FALL_BACK, _A.AWAIT_LANDING)),
        _E.PEER_GONE: Row(_S.ABORTED, (_A.FALL_BACK, _A.AWAIT_LANDING)),
        _E.LANDED: Row(_S.RESERVED),
        _E.CONTENT_OK: Row(_S.RESERVED),
        _E.ADOPTED: Row(_S.RESERVED),
        _E.FAILED: Row(_S.ABORTED, _FENCED_END),
        _E.CANCELLED: Row(_S.ABORTED, (_A.SEND_ENDED,)),
        _E.RESERVE_DEADLINE: Row(_S.RESERVED),
        _E.DEADLINE: Row(_S.EXPIRED, _FENCED_END),
        _E.ASK_AGAIN: Row(_S.RESERVED),
    },
    _S.RECEIVED: {
        **_decode_received(_S.RECEIVED),
        _E.CONTENT_OK: Row(_S.VERIFIED, (_A.ADOPT,)),
    },
    _S.VERIFIED: {
        **_decode_received(_S.VERIFIED),
        _E.ADOPTED: Row(_S.ADOPTED, (_A.SEND_ENDED,)),
    },
    # The blocks are the running request's. Prefill may not have heard it: it asks by its Handoff or its end.
    _S.ADOPTED: {
        **{event: Row(_S.ADOPTED) for event in _decode_over(_S.ADOPTED)},
        _E.HANDED_OFF: Row(_S.ADOPTED, (_A.SEND_ENDED,)),
    },
    _S.ABORTED: _decode_over(_S.ABORTED),
    _S.EXPIRED: _decode_over(_S.EXPIRED),
}


def render(table: Table) -> str:
    """The table in Markdown, a line for each (state, event), as it stands in PROTOCOL.md."""
    lines = ["| in | on | to | does |", "|---|---|---|---|"]
    for state, rows in table.items():
        for event in Event:
            if event in rows:
                row = rows[event]
                does = ", ".join(row.actions) or "–"
                lines.append(f"| {state} | {event} | {row.state if row.state != state else '='} | {does} |")
    return "\n".join(lines)
