"""Reads JSON that must say one thing: where a name is given twice, readers differ in which they take."""

import json
from typing import Any

from workers.weights.errors import WeightsError


def parse_json(data: bytes, source: str) -> Any:
    """Raises WeightsError naming `source` for what is not JSON, is nested too deeply, or gives a name in an
    object twice."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(found)
        if len(values) < len(found):
            names = [name for name, _ in found]
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightsError(f"{source}: {twice!r} is given twice")
        return values

    try:
        return json.loads(data, object_pairs_hook=pairs)
    except WeightsError:
        raise
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{source}: not JSON: {error}") from None
