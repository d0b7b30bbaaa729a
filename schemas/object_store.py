"""The object store that gateways and ledgers share: a local folder, or what a URL says."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from obstore.store import LocalStore, ObjectStore, from_url

# One request to the store, and all its tries together.
REQUEST_TIMEOUT = timedelta(seconds=30)
RETRY_TIMEOUT = timedelta(seconds=60)


def open_store(url: str) -> ObjectStore:
    """`url`: a folder's path, `file:///folder`, or `s3://bucket/prefix` (also gs, az), for which the
    provider's usual variables give region, endpoint and credentials, as AWS_ENDPOINT_URL. Raises ValueError.
    """
    folder = local_folder(url)
    if folder is not None:
        return LocalStore(folder, mkdir=True, automatic_cleanup=True)
    if url.startswith("memory:"):
        raise ValueError("HEADRACE_OBJECT_STORE: memory is not shared with other processes")
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    options: dict[str, Any] = {
        "client_options": {"timeout": REQUEST_TIMEOUT, "allow_http": plain},
        "retry_config": {"retry_timeout": RETRY_TIMEOUT},
    }
    try:
        return from_url(url, **options)
    except Exception as e:
        # Not quoted: it may hold a password.
        raise ValueError(
            f"HEADRACE_OBJECT_STORE is no folder and no URL of a store: {type(e).__name__}"
        ) from e


def store_errors(url: str) -> list[str]:
    """What is wrong with HEADRACE_OBJECT_STORE, as far as that shows without asking the store."""
    folder = local_folder(url)
    if folder is None:
        try:
            open_store(url)
        except ValueError as e:
            return [str(e)]
        return []
    # The folder is made when it is first used, in the nearest that there is.
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    if not url or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return [f"HEADRACE_OBJECT_STORE: {folder} is no folder that can be written"]
    return []


def local_folder(url: str) -> Path | None:
    """The folder that `url` names, None where it is a store elsewhere."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    return None if "://" in url else Path(url)
