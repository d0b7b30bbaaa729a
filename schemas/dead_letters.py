"""What is kept of a record that cannot be used: itself as it came, and why. Pure.

A record may be as large as a topic takes, and with a reason beside it it is larger. Then its end is cut off,
and the header CUT says how much there was.
"""

from collections.abc import Iterable
from typing import NamedTuple

from schemas.headers import Headers
from schemas.topics import MAX_RECORD_BYTES

REASON = "reason"
# "value of 8388000 bytes", and likewise of a key; "2 headers".
CUT = "cut"
MAX_REASON_BYTES = 2_000
_MAX_KEY_BYTES = 16 << 10
_MAX_HEADERS_BYTES = 32 << 10
# Lengths, offsets and checksums of a record and its batch; and the header CUT.
_FRAME_BYTES = 1 << 10
_HEADER_FRAME_BYTES = 10


class DeadLetter(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: Headers


def dead_letter(
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes | None]],
    reason: str,
    most_bytes: int = MAX_RECORD_BYTES,
) -> DeadLetter:
    """What is to be kept of the record, in a topic that takes `most_bytes` of one."""
    cut = []
    kept: Headers = [(REASON, reason.encode(errors="replace")[:MAX_REASON_BYTES])]
    left_out, room = 0, _MAX_HEADERS_BYTES
    for name, content in headers:
        size = _header_bytes(name, content or b"")
        if size > room:
            left_out += 1
        else:
            room -= size
            kept.insert(-1, (name, content or b""))
    if left_out:
        cut.append(f"{left_out} headers")
    if key is not None and len(key) > _MAX_KEY_BYTES:
        cut.append(f"key of {len(key)} bytes")
        key = key[:_MAX_KEY_BYTES]
    taken = _FRAME_BYTES + len(key or b"") + sum(_header_bytes(*header) for header in kept)
    if value is not None and len(value) > most_bytes - taken:
        cut.append(f"value of {len(value)} bytes")
        value = value[: most_bytes - taken]
    if cut:
        kept.append((CUT, ", ".join(cut).encode()))
    return DeadLetter(key, value, kept)


def _header_bytes(name: str, content: bytes) -> int:
    return len(name.encode()) + len(content) + _HEADER_FRAME_BYTES
