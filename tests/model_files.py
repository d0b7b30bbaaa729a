"""The embedded model for tests of real parts: made once, shared with the local stack."""

from functools import cache
from pathlib import Path

from infra.local.model import ensure_model
from infra.local.paths import PROJECT_ROOT

MODELS_DIR = PROJECT_ROOT / ".headrace" / "models"


@cache
def gemma_folder() -> Path:
    return ensure_model(MODELS_DIR, print)
