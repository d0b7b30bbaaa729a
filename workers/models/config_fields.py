"""Reads the fields of a model's configuration, with errors that name them."""

import reprlib
from collections.abc import Mapping
from math import inf

from workers.weights.errors import WeightsError

# No size of a model comes near it. More can be written in a file, and would be allocated.
_LARGEST = 2**31 - 1
_SCALARS = (bool, int, float, str)


class ConfigFields:
    """A mapping from `source`, each of whose fields is read as what it must be.

    All methods raise WeightsError naming source and field, where it is missing and no default is given (None
    in a file is missing), or of another kind.
    """

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = "") -> None:
        """prefix: of all names that are asked for."""
        self.source = source
        self._values = values
        self._prefix = prefix

    @property
    def names(self) -> list[str]:
        """Of all fields that are there, without the prefix."""
        return [name.removeprefix(self._prefix) for name in self._values if name.startswith(self._prefix)]

    def get(self, name: str) -> object:
        """What is there, whatever it is; None if nothing."""
        return self._values.get(self._prefix + name)

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int:
        """One of `least` to `most`."""
        value = self._value(name, default)
        if type(value) is not int or value < least:
            raise self.error(
                name, "is not a positive integer" if least else "is not an integer from 0", value
            )
        if value > most:
            raise self.error(name, f"is more than {most}", value)
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise self.error(name, "is not a positive number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "is neither true nor false")
        return value

    def inner(self, name: str) -> "ConfigFields | None":
        """The fields of an object; None where it is not there or empty."""
        value = self.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "is not an object")
        return ConfigFields(value, f"{self.source}: in {name!r}")

    def refuse(self, name: str, *allowed: object) -> None:
        """Raises WeightsError where the field is there and holds none of `allowed`."""
        value = self.get(name)
        # Arrays of a GGUF file are compared by their elements.
        if value is not None and (not isinstance(value, _SCALARS) or value not in allowed):
            raise self.error(name, "asks for what is not implemented")

    def error(self, name: str, problem: str, value: object = None) -> WeightsError:
        """`value`: what was taken for it, if that is not what is there."""
        shown = reprlib.repr(self.get(name) if value is None else value)
        return WeightsError(f"{self.source}: {self._prefix}{name}: {shown} {problem}")

    def _value(self, name: str, default: object) -> object:
        value = self.get(name)
        if value is not None:
            return value
        if default is None:
            raise WeightsError(f"{self.source}: {self._prefix}{name}: missing")
        return default
