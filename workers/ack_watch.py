"""Whether a record waits for its ack though the broker answers: then a client hangs. Pure."""

# What two readings of one record's age may differ by.
_SAME_S = 0.001


class AckWatch:
    """While the broker is away nothing ages: otherwise a long outage would end all workers at once. Times in
    seconds of the monotonic clock."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._put_at: float | None = None
        self._waited = 0.0

    def waited(self, age: float, answers: bool, now: float) -> float:
        """For how long the oldest unacked record has waited for a broker that answers.

        `age`: how old it is, 0 where there is none; `answers`: the broker took the last heartbeat. Call it
        several times a second.
        """
        since, self._looked_at = self._looked_at, now
        put_at = now - age if age > 0 else None
        if put_at is None or self._put_at is None or put_at - self._put_at > _SAME_S:
            # Another one is the oldest now.
            self._put_at, self._waited = put_at, 0.0
            since = now if put_at is None else max(since, put_at)
        if answers and self._put_at is not None:
            self._waited += now - since
        return self._waited
