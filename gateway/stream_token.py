"""A short-lived word in a URL that lets its bearer read one stream: an EventSource sends no headers."""

import base64
import hashlib
import hmac
import re
import secrets

_EXPIRY_BYTES = 5
_TAG_BYTES = 16
_TOKEN = re.compile(r"[A-Za-z0-9_-]{30,82}")


class NotATokenError(ValueError):
    """No token for this stream that still holds."""


class StreamTokens:
    """Issues and checks. All gateways of a deployment are given one secret (see PublicIds)."""

    def __init__(self, secret: str) -> None:
        given = secret.encode() or secrets.token_bytes(32)
        self._key = hashlib.blake2b(given, person=b"headrace tokens").digest()

    def issue(self, tenant: str, stream: str, expires_at: int) -> str:
        """For the public id `stream` of `tenant`, until `expires_at` (seconds of the epoch)."""
        packed = expires_at.to_bytes(_EXPIRY_BYTES) + tenant.encode()
        return _text(self._tag(packed, stream) + packed)

    def tenant(self, token: str, stream: str, now: float) -> str:
        """Whose stream it lets read. `now`: seconds of the epoch. Raises NotATokenError."""
        if not _TOKEN.fullmatch(token):
            raise NotATokenError
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except ValueError:
            raise NotATokenError from None
        if _text(raw) != token:  # spare bits: a token has one spelling
            raise NotATokenError
        tag, packed = raw[:_TAG_BYTES], raw[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(packed, stream)):
            raise NotATokenError
        if now >= int.from_bytes(packed[:_EXPIRY_BYTES]):
            raise NotATokenError
        return packed[_EXPIRY_BYTES:].decode()

    def _tag(self, packed: bytes, stream: str) -> bytes:
        # No public id holds a NUL, so where it ends is certain.
        return hmac.digest(self._key, stream.encode() + b"\0" + packed, "sha256")[:_TAG_BYTES]


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
