"""What an Idempotency-Key asks for: one of the requests with it runs, and all get its answer. Pure.

The header is that of the IETF draft "The Idempotency-Key HTTP Header Field" (revision 07). A key belongs to a
tenant and a class. Admission decides which request is the first (streams/admission/idempotency.py).
"""

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from schemas.api.errors import ApiError, bad_field

_HEADER = b"idempotency-key"
_KEY = re.compile(rb"[\x20-\x7e]{1,255}")
_BYTES = 16
_canonical = msgspec.json.Encoder(order="sorted").encode


class KeyedBody(NamedTuple):
    """A key, and 16 bytes that tell one body from another."""

    key: bytes
    body: bytes


class Joined(NamedTuple):
    """The request whose answer another one with the same key gets."""

    public_id: str
    request_id: bytes
    accepted_at: int


def has_key(headers: Mapping[bytes, bytes]) -> bool:
    return _HEADER in headers


def refuse_key(headers: Mapping[bytes, bytes]) -> None:
    """Where a request made twice makes two. Raises ApiError 400."""
    if has_key(headers):
        message = "Idempotency-Key: not served here; what was made twice can be cancelled or deleted"
        raise ApiError(400, "unsupported_field", message, "Idempotency-Key")


def keyed_body(headers: Mapping[bytes, bytes], path: str, body: bytes) -> KeyedBody | None:
    """None without the header. `body` is JSON. Raises ApiError 400.

    What a body means counts, not how it is spelled: a client that builds it anew may order it anew.
    """
    key = headers.get(_HEADER)
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise bad_field("Idempotency-Key", "1 to 255 printable ASCII characters")
    try:
        meant = _canonical(msgspec.json.decode(body)) if body else b""
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {e}") from None
    said = path.encode() + b"\0" + meant
    return KeyedBody(key, hashlib.blake2b(said, digest_size=_BYTES).digest())


def key_of(tenant: str, key: bytes, index: int) -> bytes:
    """What admission knows the choice `index` of the request by: 16 bytes."""
    said = b"%b\0%d\0%b" % (tenant.encode(), index, key)
    return hashlib.blake2b(said, digest_size=_BYTES).digest()
