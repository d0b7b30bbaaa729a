"""Remembers attempts for a while: those that ended here, and those that were cancelled before they came."""


class AttemptMemory:
    """Highest attempt per request id, forgotten `seconds` after it was last noted. Pure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # In the order of expiry, because all stay equally long and noting again moves to the end.
        self._entries: dict[bytes, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, request_id: bytes, attempt: int, now: float) -> None:
        """Remembers all attempts up to `attempt`. `now` never goes back."""
        self._forget(now)
        known = self._entries.pop(request_id, None)
        highest = attempt if known is None else max(attempt, known[0])
        self._entries[request_id] = (highest, now + self._seconds)

    def covers(self, request_id: bytes, attempt: int, now: float) -> bool:
        """Whether an attempt at least as high is remembered."""
        entry = self._entries.get(request_id)
        return entry is not None and entry[0] >= attempt and entry[1] > now

    def _forget(self, now: float) -> None:
        while self._entries:
            request_id, (_, expires) = next(iter(self._entries.items()))
            if expires > now:
                break
            del self._entries[request_id]
