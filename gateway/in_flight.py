"""How many requests this gateway answers at a time, in all and for each key, and how much they may send."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256

from schemas.api.errors import ApiError

_RETRY_MS = 1_000


class InFlight:
    """A request counts from its head to its last byte; what runs with nobody reading it does not."""

    def __init__(self, most: int, most_per_key: int) -> None:
        self._most = most
        self._most_per_key = most_per_key
        self._by_key: dict[bytes, int] = {}
        self.count = 0

    @contextmanager
    def one(self, key: bytes) -> Iterator[None]:
        """Counts a request of `key`. Raises ApiError 503 where there are too many."""
        by_key = self._by_key
        of_key = by_key.get(key, 0)
        if self.count >= self._most:
            raise _too_many("too_many_streams", f"this gateway answers {self._most} requests at a time")
        if of_key >= self._most_per_key:
            message = f"{self._most_per_key} requests with this key are being answered here"
            raise _too_many("too_many_streams_of_key", message)
        self.count += 1
        by_key[key] = of_key + 1
        try:
            yield
        finally:
            self.count -= 1
            by_key[key] -= 1
            if not by_key[key]:
                del by_key[key]


class BodyBudget:
    """How many bytes of bodies are in memory at a time, those being read and those being looked at."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """Gives what is to be told of each piece, and raises ApiError 503 where there is no room for it."""
        own = 0

        def take(count: int) -> None:
            nonlocal own
            if self.held + count > self._most:
                raise _too_many("too_many_bodies", "the bodies that are being read leave no room for more")
            own += count
            self.held += count

        try:
            yield take
        finally:
            self.held -= own


def caller(headers: Mapping[bytes, bytes], query_string: bytes) -> bytes:
    """By what a request is counted, known or not: a digest of its key, or of the URL's token.

    A digest, for how long a dict takes to find a key would tell something about the keys in it.
    """
    presented = headers.get(b"authorization") or headers.get(b"x-api-key") or query_string
    return sha256(presented).digest()


def _too_many(code: str, message: str) -> ApiError:
    return ApiError(503, code, f"{message}; try again later", None, _RETRY_MS)
