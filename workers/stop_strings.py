"""Finds stop strings in the text of an output while its tokens come, whatever they are cut into."""

from collections import deque
from collections.abc import Sequence

from schemas.tokenization import Detokenizer


class _Node:
    """A prefix of some stop string. `suffix` is the longest shorter prefix that it ends with."""

    __slots__ = ("children", "complete", "depth", "suffix")

    def __init__(self, depth: int) -> None:
        self.children: dict[str, _Node] = {}
        self.depth = depth
        self.suffix: _Node | None = None
        # Characters of the longest stop string that ends here; 0: none does.
        self.complete = 0


class StopStrings:
    """An automaton of all stop strings of one request (Aho and Corasick 1975, algorithms 2 and 3)."""

    def __init__(self, stop: Sequence[str]) -> None:
        """stop: not empty, and none of them empty."""
        self.root = _Node(0)
        for string in stop:
            node = self.root
            for character in string:
                child = node.children.get(character)
                if child is None:
                    child = node.children[character] = _Node(node.depth + 1)
                node = child
            node.complete = node.depth
        waiting = deque([self.root])
        while waiting:
            node = waiting.popleft()
            for character, child in node.children.items():
                waiting.append(child)
                child.suffix = self.root if node is self.root else self.next(node.suffix, character)
                child.complete = max(child.complete, child.suffix.complete)

    def next(self, node: _Node | None, character: str) -> _Node:
        """The longest prefix of a stop string that the text ends with after one more character."""
        while node is not None:
            if child := node.children.get(character):
                return child
            node = node.suffix
        return self.root


class StopStringChecker:
    """A `workers.request.StopChecker`. The text is what a `schemas.tokenization.Detokenizer` shows.

    The output is cut before the first stop string: where several end within the text of one token, before the
    one that begins first. A stop string that ends within the first `min_tokens - 1` tokens is ignored.
    """

    __slots__ = ("_detokenizer", "_held_ends", "_length", "_min_tokens", "_node", "_num_tokens", "_strings")

    def __init__(self, stop: Sequence[str], token_bytes: Sequence[bytes], min_tokens: int = 0) -> None:
        self._strings = StopStrings(stop)
        self._node = self._strings.root
        self._detokenizer = Detokenizer(token_bytes)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._length = 0  # of the text so far, in characters
        # Where the text of each held token ends, in characters.
        self._held_ends: deque[int] = deque()

    @property
    def num_held(self) -> int:
        """How many of the newest output tokens must not be shown yet: their text may become a stop string."""
        return len(self._held_ends)

    def push(self, token_id: int) -> int | None:
        """Takes the next output token. Once a stop string is complete: the characters of text to keep."""
        self._num_tokens += 1
        length, node, step = self._length, self._node, self._strings.next
        cut: int | None = None
        for character in self._detokenizer.push((token_id,)):
            length += 1
            node = step(node, character)
            if node.complete and (cut is None or length - node.complete < cut):
                cut = length - node.complete
        self._length, self._node = length, node
        if cut is not None and self._num_tokens >= self._min_tokens:
            return cut
        shown = length - self._num_pending(node)
        held = self._held_ends
        held.append(length)
        while held and held[0] <= shown:
            held.popleft()
        return None

    @staticmethod
    def _num_pending(node: _Node) -> int:
        """Characters at the end of the text that a stop string may still begin with and go on from."""
        while not node.children and node.suffix is not None:  # complete, and ignored for min_tokens
            node = node.suffix
        return node.depth
