"""The public id of a stream: all that any gateway needs to read it from the log or to stop it.

It is bound to its tenant by a keyed hash instead of a record in the log: an id that this deployment did not
give to this tenant is refused before anything is read, so nobody can have another tenant's partition
scanned, or have a scan begin where no request of theirs began. All ways to be wrong look alike.

The first offset is where the gateway stood in the reply partition when it accepted the request. All records
about a request lie behind its acceptance, so that is a safe lower bound, and it costs no question to Kafka.
"""

import base64
import hashlib
import hmac
import re
import secrets
import struct
from typing import NamedTuple

from schemas.api.tool_calls import CHAT_CALL, MESSAGE_CALL

_VERSION = 1
_MAY_BE_CUT = 1
_DESCRIBED = 2
_CALL_PREFIXES = {"": 0, CHAT_CALL: 4, MESSAGE_CALL: 8}
# Version, flags, class, partition, first offset, hash of the model's name, request_id.
_LAYOUT = struct.Struct(">BBBHQ4s16s")
# Makes 48 bytes: base64 without padding and without spare bits, so an id has one spelling.
_TAG_BYTES = 15
_ID = re.compile(r"[A-Za-z0-9_-]{64}")


class PublicId(NamedTuple):
    """`first_offset` is at or before the first record of the request in `reply_partition`.

    `priority` is the class it was asked for in, which the reply partition does not say. `model_hash` is
    `hash_model` of the model whose tokenizer made the prompt. `may_be_cut`: the request names stop strings.
    `described`: a `Described` lies there too, so that the API's own answer can be made again. `call_prefix`:
    how the ids of its tool calls begin; empty where the output is not read for any.
    """

    reply_partition: int
    first_offset: int
    request_id: bytes
    priority: int
    model_hash: bytes
    may_be_cut: bool
    described: bool = False
    call_prefix: str = ""


class NotAnIdError(ValueError):
    """No id that was given to this tenant."""


def hash_model(model_id: str) -> bytes:
    """4 bytes: models of one catalogue need telling apart, no more."""
    return hashlib.blake2b(model_id.encode(), digest_size=4).digest()


class PublicIds:
    """Encodes and decodes. All gateways of a deployment are given one secret.

    With an empty `secret` a random one is taken: ids are then good in this process alone.
    """

    def __init__(self, secret: str) -> None:
        given = secret.encode() or secrets.token_bytes(32)
        self._key = hashlib.blake2b(given, person=b"headrace streams").digest()

    def encode(self, tenant: str, public_id: PublicId) -> str:
        """64 characters of A-Z, a-z, 0-9, '-' and '_'."""
        packed = _LAYOUT.pack(
            _VERSION,
            (_MAY_BE_CUT if public_id.may_be_cut else 0)
            | (_DESCRIBED if public_id.described else 0)
            | _CALL_PREFIXES[public_id.call_prefix],
            public_id.priority,
            public_id.reply_partition,
            public_id.first_offset,
            public_id.model_hash,
            public_id.request_id,
        )
        return base64.urlsafe_b64encode(packed + self._tag(packed, tenant)).decode()

    def decode(self, tenant: str, text: str) -> PublicId:
        """Raises NotAnIdError; it does not say what is wrong."""
        if not _ID.fullmatch(text):
            raise NotAnIdError
        raw = base64.urlsafe_b64decode(text)
        packed, tag = raw[: _LAYOUT.size], raw[_LAYOUT.size :]
        if not hmac.compare_digest(tag, self._tag(packed, tenant)):
            raise NotAnIdError
        version, flags, priority, partition, first_offset, model_hash, request_id = _LAYOUT.unpack(packed)
        if version != _VERSION:
            raise NotAnIdError
        may_be_cut, described = bool(flags & _MAY_BE_CUT), bool(flags & _DESCRIBED)
        prefix = next((name for name, flag in _CALL_PREFIXES.items() if flags & flag), "")
        return PublicId(
            partition, first_offset, request_id, priority, model_hash, may_be_cut, described, prefix
        )

    def _tag(self, packed: bytes, tenant: str) -> bytes:
        # The packed part has a fixed length, so what follows it cannot be shifted into it.
        return hmac.digest(self._key, packed + tenant.encode(), "sha256")[:_TAG_BYTES]
