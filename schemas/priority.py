"""The three priority classes. Lower is served first; the value is `partition % 3`."""

from enum import IntEnum


class PriorityClass(IntEnum):
    INTERACTIVE = 0
    FREE = 1
    BATCH = 2

    @classmethod
    def parse(cls, name: str) -> "PriorityClass":
        """The class called `name` (any case). Raises ValueError that lists the names."""
        try:
            return cls[name.upper()]
        except KeyError:
            names = ", ".join(c.label for c in cls)
            raise ValueError(f"unknown priority class {name!r}: use one of {names}") from None

    @property
    def label(self) -> str:
        return self.name.lower()
