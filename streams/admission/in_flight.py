"""What was dispatched to a worker and its heartbeat does not tell yet."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class InFlight:
    """A dispatch that the worker's heartbeat does not count yet. `offset` is None until the ack.

    `cached_tokens` of its prompt are expected to be found there; `prefill_tokens` are the others.
    """

    priority: int
    blocks: int
    prefill_tokens: int
    cached_tokens: int = 0
    offset: int | None = None
