"""The secret with which a local stack's gateways sign the ids of streams."""

import os
import secrets
from pathlib import Path

_NAME = "stream-secret"


def stream_secret(data_dir: Path) -> str:
    """Made once for a data folder, so that ids outlive a restart as the log does; for its owner's eyes only.

    Raises OSError. The caller holds the folder's lock.
    """
    path = data_dir / _NAME
    if path.exists():
        return path.read_text()
    data_dir.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_urlsafe(32)
    draft = data_dir / f".{_NAME}"
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret)
    # A stack that is killed here leaves a whole secret or none.
    draft.rename(path)
    return secret
