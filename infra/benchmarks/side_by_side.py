"""Figures of one side of a comparison over several rounds, and the ratios of two sides."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Of these the least is the best: they are times.
TIMES = frozenset({"http_8x481_ttft"})


@dataclass(slots=True)
class Figures:
    """For each key what each round gave: (value, the share of the processors that others had meanwhile).

    Others can only ever slow a measurement down, so the best round is the nearest to the truth.
    """

    rounds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, values: Mapping[str, float], foreign_share: float) -> None:
        for key, value in values.items():
            self.rounds.setdefault(key, []).append((value, foreign_share))

    def best(self) -> dict[str, float]:
        return {key: round(self._best(key)[0], 2) for key in self.rounds}

    def foreign_shares(self) -> dict[str, float]:
        """Of the best round of each key."""
        return {key: round(self._best(key)[1], 3) for key in self.rounds}

    def _best(self, key: str) -> tuple[float, float]:
        return min(self.rounds[key]) if key in TIMES else max(self.rounds[key])


def compare(ours: Figures, theirs: Figures) -> dict[str, float] | None:
    """Ours divided by theirs for each key that both have; None where there is nothing to compare."""
    mine, others = ours.best(), theirs.best()
    ratios = {key: round(value / others[key], 3) for key, value in mine.items() if others.get(key)}
    return ratios or None
