"""Bodies and answers of /admin/v1/models. Pure."""

from typing import Any

import msgspec

from schemas.records import Model


class ModelOffer(msgspec.Struct, forbid_unknown_fields=True):
    """`fallback_models` serve under overload, in this order, in the place of those in its model.json."""

    fallback_models: list[str] = []


def view(model: Model, version: int) -> dict[str, Any]:
    """As administrators are told of it."""
    return {
        "object": "model",
        "id": model.id,
        "fallback_models": model.fallback_models,
        "version": version,
    }
