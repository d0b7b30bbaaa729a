"""A token bucket that gives back what a reservation did not use, without ever lending it twice."""

from bisect import bisect_right

MAX_SEGMENTS = 128


class TokenBucket:
    """Holds at most `capacity` tokens and gains `capacity` of them a minute.

    Giving back is done as if the smaller amount had been taken in the first place. What the bucket would
    then have lost by being full is not given back: so over any window of length w, tokens taken and used
    never exceed capacity + w × refill. For this the bucket remembers the highest level it had in each
    segment between two takes, at most MAX_SEGMENTS of them; older ones are merged, which can only give
    back less.
    """

    __slots__ = ("_next_mark", "_peaks", "_starts", "_updated_at", "capacity", "level")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.level = float(capacity)
        self._updated_at: int | None = None
        self._next_mark = 1
        self._starts = [0]
        self._peaks = [float(capacity)]

    def resize(self, capacity: int, now: int) -> None:
        """Changes the limit; what was consumed under the old one stays consumed."""
        self.advance(now)
        difference = capacity - self.capacity
        self.capacity = capacity
        self.level += difference
        self._peaks = [peak + difference for peak in self._peaks]

    def advance(self, now: int) -> None:
        """Refills up to `now` (ms). A clock that goes back refills nothing."""
        if self._updated_at is None:
            self._updated_at = now
        elapsed = now - self._updated_at
        if elapsed > 0:
            self._updated_at = now
            self.level = min(self.capacity, self.level + elapsed * self.capacity / 60_000)
            if self.level > self._peaks[-1]:
                self._peaks[-1] = self.level

    def wait_ms(self, amount: int, now: int) -> int:
        """How long until `amount` can be taken; 0 is now. The caller knows that it is below capacity."""
        self.advance(now)
        missing = amount - self.level
        if missing <= 0:
            return 0
        return max(1, -int(-missing * 60_000 // self.capacity))

    def remaining(self, now: int) -> int:
        """Whole tokens that can be taken now."""
        self.advance(now)
        return max(0, int(self.level))

    def reset_ms(self, now: int) -> int:
        """How long until the bucket is full, if nothing is taken meanwhile."""
        self.advance(now)
        missing = self.capacity - self.level
        return 0 if missing <= 0 or self.capacity == 0 else -int(-missing * 60_000 // self.capacity)

    def take(self, amount: int, now: int) -> int:
        """Takes `amount` whether it is there or not (the refill pays debts); a mark for `give_back`."""
        self.advance(now)
        self.level -= amount
        mark = self._next_mark
        self._next_mark += 1
        self._starts.append(mark)
        self._peaks.append(self.level)
        if len(self._starts) > MAX_SEGMENTS:
            self._merge_older_half()
        return mark

    def give_back(self, mark: int, amount: float, now: int) -> None:
        """Puts back `amount` of what was taken at `mark`, less what would have overflowed since."""
        self.advance(now)
        for i in range(bisect_right(self._starts, mark) - 1, len(self._peaks)):
            amount = min(amount, self.capacity - self._peaks[i])
            if amount <= 0:
                return
            self._peaks[i] += amount
        self.level += amount

    def _merge_older_half(self) -> None:
        half = MAX_SEGMENTS // 2
        self._starts[:half] = self._starts[:half:2]
        self._peaks[:half] = [
            max(pair) for pair in zip(self._peaks[:half:2], self._peaks[1:half:2], strict=True)
        ]
