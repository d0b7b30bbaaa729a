"""API keys of tenants. Only the hash of a key is kept; the key itself is shown once, when it is made."""

import hashlib
import re
import secrets

from schemas.clock import epoch_ms
from schemas.records import ApiKey

KEY_ID_LENGTH = 11
_KEY = re.compile(r"hr_[A-Za-z0-9_-]{43}")


def new_key(created_at: int | None = None) -> tuple[str, ApiKey]:
    """(the key for the tenant, what goes into the tenant's record).

    `created_at` is in ms of the epoch, now if None.

    The key is `hr_` and 256 random bits, so a plain SHA-256 is enough: there is nothing to guess.
    """
    key = f"hr_{secrets.token_urlsafe(32)}"
    made_at = epoch_ms() if created_at is None else created_at
    return key, ApiKey(key_id=key_id(key), sha256=hash_key(key), created_at=made_at)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def key_id(key: str) -> str:
    """The part of a key that may be logged and finds its hash; 48 of its bits."""
    return key[:KEY_ID_LENGTH]


def is_key(text: str) -> bool:
    """`text` has the form of a key."""
    return _KEY.fullmatch(text) is not None
