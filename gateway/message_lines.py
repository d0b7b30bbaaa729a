"""The body of POST /v1/messages/batches as it comes in, made into the lines of an input file."""

import hashlib
from collections.abc import AsyncIterator

import ijson
from ijson import JSONError

from schemas.api.errors import ApiError, bad_field
from schemas.api.message_batches import MAX_REQUESTS, line_of

_REQUESTS = "requests.item"


class MessageLines:
    """`count` lines of `written` bytes so far. A request may have `most_bytes`, give or take a piece."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.count = 0
        self.written = 0
        self._seen: set[bytes] = set()

    async def read(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The lines, as many at a time as a piece of the body holds. Raises ApiError that names what does not
        fit."""
        items: list[object] = ijson.sendable_list()
        names: list[tuple[str, str, object]] = ijson.sendable_list()
        read_items = ijson.items_coro(items, _REQUESTS, use_float=True)
        read_names = ijson.parse_coro(names)
        since = 0
        try:
            async for piece in pieces:
                since += len(piece)
                if since > self._most_bytes + len(piece):
                    message = f"requests.{self.count}: it is larger than {self._most_bytes} bytes"
                    raise ApiError(413, "body_too_large", message, f"requests.{self.count}")
                if piece:
                    read_items.send(piece)
                    read_names.send(piece)
                self._check(names)
                if items:
                    yield self._lines(items)
                    items.clear()
                    since = 0
            read_items.close()
            read_names.close()
        except JSONError as e:
            raise ApiError(400, "invalid_json", f"the body is not valid JSON: {e}") from None
        if not self.count:
            raise bad_field("requests", f"give 1 to {MAX_REQUESTS} requests")

    def _lines(self, items: list[object]) -> bytes:
        lines = []
        for item in items:
            if self.count == MAX_REQUESTS:
                raise bad_field("requests", f"more than {MAX_REQUESTS} requests")
            custom_id, line = line_of(item, self.count)
            digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
            if digest in self._seen:
                raise bad_field(f"requests.{self.count}.custom_id", f"{custom_id!r} stands twice")
            self._seen.add(digest)
            lines.append(line)
            self.count += 1
            self.written += len(line)
        return b"".join(lines)

    def _check(self, events: list[tuple[str, str, object]]) -> None:
        """The body is an object with one field, a list."""
        for prefix, event, value in events:
            if prefix == "" and event == "map_key" and value != "requests":
                raise ApiError(400, "unknown_field", f"{value}: this field is not supported", str(value))
            if prefix == "" and event not in ("start_map", "map_key", "end_map"):
                raise ApiError(400, "invalid_json", "the body is not a JSON object")
            if prefix == "requests" and event not in ("start_array", "end_array"):
                raise bad_field("requests", "must be a list")
        events.clear()
