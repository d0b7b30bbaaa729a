"""Where local things lie: the project, its git-ignored data, and the download cache that clones share."""

from collections.abc import Mapping
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_DATA_DIR = PROJECT_ROOT / ".headrace" / "data"
DEFAULT_MODELS_DIR = PROJECT_ROOT / ".headrace" / "models"


def cache_dir(env: Mapping[str, str]) -> Path:
    """`HEADRACE_CACHE`, else `headrace` in the user's cache folder. Not created here."""
    if chosen := env.get("HEADRACE_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"
