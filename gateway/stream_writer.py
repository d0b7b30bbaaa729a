"""Writes to a connection from where a stream's tokens come in, without a turn of the event loop for each."""

from typing import Any

KEY = "headrace.stream_writer"


class StreamWriter:
    """Beside ASGI's `send`, for the body of a response that has started; `cycle` is uvicorn's."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """The connection takes a piece now, and has sent what it was given up to a little."""
        cycle = self._cycle
        return (
            cycle.response_started
            and cycle.chunked_encoding
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, body: bytes) -> None:
        """Only where `ready`; `body` is not empty."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
