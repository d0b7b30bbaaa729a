"""Why a request is refused, as its owner will tell its client."""

from dataclasses import dataclass

# Where nothing is known of how long it will take.
RETRY_LATER_MS = 1_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """`status` is HTTP's. `retry_after_ms` is None where a new try is of no use."""

    status: int
    code: str
    message: str
    retry_after_ms: int | None = None
