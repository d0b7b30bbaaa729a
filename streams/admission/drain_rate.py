"""How fast a queue drains, as measured while something waits in it: then it is what the fleet can."""

# Half of the rate is of the last so many ms of waiting: some dozens of answers of a busy fleet.
_HALF_LIFE_MS = 10_000
# The workers' own rates weigh as much as a measurement of so many ms: few dispatches say little.
_FIRST_GUESS_MS = 2_000


class DrainRate:
    """Tokens (prompt and expected output) that one process's queue of a model and class gives to workers a
    second.

    Kept per worker, so that it grows and shrinks with the fleet. What is dispatched while nobody waits says
    how much was asked for, and does not count.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._ms = 0.0
        self._served = 0
        self._waited = False
        self._last: int | None = None

    def served(self, tokens: int) -> None:
        """So many went to a worker."""
        self._served += tokens

    def tick(self, waits: bool, num_workers: int, now: int) -> None:
        """Closes the time since the last tick; `waits`: whether something waits now."""
        elapsed = 0 if self._last is None else now - self._last
        if waits and self._waited and elapsed > 0 and num_workers:
            keep = 0.5 ** (elapsed / _HALF_LIFE_MS)
            self._tokens = self._tokens * keep + self._served / num_workers
            self._ms = self._ms * keep + elapsed
        self._served, self._waited, self._last = 0, waits, now

    def tokens_per_s(self, num_workers: int, guess: float) -> float:
        """The rate of `num_workers`; `guess` is theirs by their own word, until there is a better one."""
        tokens = self._tokens * num_workers + guess * _FIRST_GUESS_MS / 1_000
        return tokens * 1_000 / (self._ms + _FIRST_GUESS_MS)
