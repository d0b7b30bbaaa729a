"""The KV of one transfer at prefill: what is computed of it, for a writer that may begin later or earlier."""

import threading

from schemas.records import Reserved
from workers.handoff.writer import Writer


class Source:
    """Thread-safe, and nothing waits: the engine's thread says what is stored, the event loop when to write.

    `block_ids` are the blocks of its tokens, in order. They grow as the engine takes them, before anything
    that lies there is said to be stored. Nothing is written after `until` (s of the monotonic clock).
    """

    def __init__(self, transfer_id: bytes, num_tokens: int, writer: Writer, until: float) -> None:
        self.transfer_id = transfer_id
        self.num_tokens = num_tokens
        self._until = until
        self.block_ids: list[int] = []
        self._writer = writer
        self._lock = threading.Lock()
        self._stored: list[tuple[range, range]] = []
        self._is_writing = False
        self._is_complete = False

    def stored(self, tokens: range, layers: range) -> bool:
        """The KV of these tokens lies there, in these layers. Returns whether it is the first that does."""
        with self._lock:
            is_first = not self._stored
            self._stored.append((tokens, layers))
            if self._is_writing:
                self._writer.computed(self.transfer_id, tokens, layers)
        return is_first

    def start(self, reserved: Reserved) -> None:
        """Writes what is stored, and what will be."""
        with self._lock:
            self._writer.start(reserved, self.block_ids, self.num_tokens, self._until)
            self._is_writing = True
            for tokens, layers in self._stored:
                self._writer.computed(self.transfer_id, tokens, layers)
            if self._is_complete:
                self._writer.complete(self.transfer_id)

    def complete(self) -> None:
        """All is stored."""
        with self._lock:
            self._is_complete = True
            if self._is_writing:
                self._writer.complete(self.transfer_id)
