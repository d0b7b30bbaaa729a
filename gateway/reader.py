"""Between the log and one HTTP client: what has come and is not yet written.

The log reader calls `on_bound`, `on_tokens`, `on_end` and never waits; the HTTP handler looks at what is
there and waits for more. Both run in one event loop.

A reader holds no output of its own, only a place in the token ids of the fold: a client that reads slowly
costs no memory beyond them, and gets all in the end.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from gateway.metrics import Timing
from schemas.api.errors import ApiError
from schemas.api.told_tokens import ToldTokens
from schemas.records import Completion
from schemas.tokenization import Detokenizer

End = Completion | ApiError

# Taken at a time: about what a connection buffers, so that one reader far behind does not hold up the others.
_MOST_TOKENS = 256
_HEAR_S = 0.05


class Reader:
    """A client that waits. `end` is the Completion of a normal end, or the error to tell the client.

    `token_ids` are those of the fold, which grow. `model` is the one that serves, known once admission's word
    of it is `heard`: that is when a run is `bound`, or a moment later where tokens overtook it; it is set
    before where nobody need wait. `told` takes the tokens' log probabilities, if the request asks for them;
    who calls `on_tokens` gives it those tokens first. `started_at` and `now` are monotonic seconds.
    """

    __slots__ = (
        "_last_tokens_at",
        "_started_at",
        "_timing",
        "_waiter",
        "bound",
        "disconnected",
        "end",
        "heard",
        "model",
        "token_ids",
        "told",
    )

    def __init__(self, model: str, timing: Timing, started_at: float) -> None:
        self.model = model
        self.bound = False
        self.heard = False
        self.disconnected = False
        self.end: End | None = None
        self.told: ToldTokens | None = None
        self.token_ids: list[int] = []
        self._timing = timing
        self._started_at = started_at
        self._last_tokens_at: float | None = None
        self._waiter: asyncio.Future[None] | None = None

    def on_bound(self, model: str | None) -> None:
        self.bound = True
        if model is not None:
            self.model, self.heard = model, True
        self._wake()

    def on_tokens(self, count: int, finish_reason: str | None, now: float) -> None:
        """There are new output tokens; `count` is that of all so far."""
        last = self._last_tokens_at
        if last is None:
            self._timing.first.observe(now - self._started_at)
        else:
            self._timing.between.observe(now - last)
        self._last_tokens_at = now

    def on_end(self, end: End) -> None:
        """The first end counts."""
        if self.end is None:
            self.end = end
            self._wake()

    def on_disconnect(self) -> None:
        self.disconnected = True
        self._wake()

    def on_news(self) -> None:
        """Something else has come that a handler waits for."""
        self._wake()

    def on_quiet(self, now: float) -> None:
        """Called ten times a second, for what a client is owed when nothing comes."""

    async def wait(self) -> None:
        """Until something happens. Look at what is there first: this waits for the next thing."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    @staticmethod
    async def wait_any(readers: "Sequence[Reader]") -> None:
        """As `wait`, until something happens at one of them."""
        waiter = asyncio.get_running_loop().create_future()
        for reader in readers:
            reader._waiter = waiter
        await waiter

    @staticmethod
    async def all_heard(readers: "Sequence[Reader]") -> None:
        """Until what admission says of them is known, for it goes out with the head of their answer.

        It was sent before any token could be, by another: it is there already, or comes within moments.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEAR_S):
                while any(reader._is_unheard for reader in readers):
                    await Reader.wait_any(readers)

    @property
    def _is_unheard(self) -> bool:
        return self.bound and not self.heard and not self.disconnected and not isinstance(self.end, ApiError)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class WholeReader(Reader):
    """Waits for the end; `token_ids` are then all there are."""

    __slots__ = ()


class StreamReader(Reader):
    """Turns tokens into text when the client takes it, behind output position `after` (-1: all).

    The text up to a position is a function of the tokens up to it: a character whose bytes are not whole at
    `after` was not shown with it, and comes behind it.

    `may_be_cut`: the request names stop strings. The worker tells no tokens beyond what may become one, but
    for those that end the output, so only these wait for the Completion. `cut_off` is then the text from the
    stop string on.

    `keep_alive_s` without an event makes `keep_alive_due`; so does `start_wait_s` of queueing at the
    beginning. A client that does not take what is there for `write_timeout_s` is `stuck`; `on_stuck` is
    called then, for a handler that waits in a send cannot look.

    `push` may write what has come in place of waking a handler that waits; it returns whether that was all.
    """

    __slots__ = (
        "_cut_at",
        "_keep_alive_s",
        "_limit",
        "_may_be_cut",
        "_next",
        "_num_known",
        "_push",
        "_push_one",
        "_quiet_since",
        "_shown_chars",
        "_takes",
        "_takes_seen",
        "_untaken_since",
        "_write_timeout_s",
        "cut_off",
        "keep_alive_due",
        "on_stuck",
        "push",
        "stuck",
    )

    def __init__(
        self,
        model: str,
        timing: Timing,
        started_at: float,
        detokenizer: Detokenizer,
        *,
        may_be_cut: bool,
        start_wait_s: float,
        keep_alive_s: float,
        write_timeout_s: float,
        after: int = -1,
    ) -> None:
        super().__init__(model, timing, started_at)
        self.cut_off = ""
        self.keep_alive_due = False
        self.stuck = False
        self.on_stuck: Callable[[], object] | None = None
        self.push: Callable[[], bool] | None = None
        self._push = detokenizer.pieces
        self._push_one = detokenizer.piece
        self._may_be_cut = may_be_cut
        self._num_known = after + 1
        self._next = 0  # the position of the next token to be turned into text
        self._limit = 0  # of those that may be
        self._cut_at: int | None = None
        self._shown_chars = 0
        self._keep_alive_s = keep_alive_s
        self._quiet_since = started_at + start_wait_s - keep_alive_s
        self._write_timeout_s = write_timeout_s
        self._takes = 0
        self._takes_seen = 0
        self._untaken_since = started_at

    def on_tokens(self, count: int, finish_reason: str | None, now: float) -> None:
        super().on_tokens(count, finish_reason, now)
        if finish_reason == "stop":
            if self._may_be_cut:
                # Where the text ends, if it was a stop string, stands in the Completion that follows.
                return
            count -= 1  # the token that ended the output is counted, not shown
        self._limit = count
        self._quiet_since = now
        # Only in place of a handler that waits: else what it is about to write would come behind this.
        if self.push is None or self._waiter is None or not self.push():
            self._wake()

    def on_end(self, end: End) -> None:
        if self.end is None and isinstance(end, Completion) and end.finish_reason == "stop":
            self._cut_at = end.text_length
            if end.text_length is None:
                self._limit = max(self._limit, len(self.token_ids) - 1)
        super().on_end(end)

    @property
    def has_more(self) -> bool:
        """There is something to take."""
        return self._next < self._limit or self._cut_at is not None

    @property
    def shown_ids(self) -> list[int]:
        """Those that text was made of, or will be, as far as is known before the end."""
        return self.token_ids[: self._limit]

    def take(self) -> list[tuple[str, int]]:
        """What was not taken yet, token by token: (text, position). If that is much, not all of it."""
        self._takes += 1
        begin = self._next
        if self._limit == begin + 1 and begin >= self._num_known and not self._may_be_cut:
            # One new token, as nearly all calls find it: a third of the time that what follows takes.
            self._next = self._limit
            text = self._push_one(self.token_ids[begin])
            if text:
                return [(text, begin)]
        pieces: list[tuple[str, int]] = []
        while not pieces and self._next < self._limit:
            begin = self._next
            self._next = min(begin + _MOST_TOKENS, self._limit)
            if begin < self._num_known:
                self._next = min(self._next, self._num_known)
            texts = self._push(self.token_ids[begin : self._next])
            if self._may_be_cut:
                self._shown_chars += sum(map(len, texts))
            if begin >= self._num_known:
                pieces = [(text, position) for position, text in enumerate(texts, begin) if text]
        if not pieces and self._cut_at is not None:
            pieces = self._take_ending(self._cut_at)
            self._cut_at = None
        return pieces

    def _take_ending(self, cut_at: int) -> list[tuple[str, int]]:
        texts = self._push(self.token_ids[self._next :])
        known = sum(map(len, texts[: max(0, self._num_known - self._next)]))
        text, shown = "".join(texts), max(0, cut_at - self._shown_chars)
        self.cut_off = text[shown:]
        return [(text[known:shown], len(self.token_ids) - 1)] if known < min(shown, len(text)) else []

    def on_quiet(self, now: float) -> None:
        if now - self._quiet_since >= self._keep_alive_s:
            self._quiet_since = now
            self.keep_alive_due = True
            self._wake()
        untaken = self.has_more or self.end is not None or self.keep_alive_due
        if not untaken or self._takes != self._takes_seen:
            self._takes_seen, self._untaken_since = self._takes, now
        elif now - self._untaken_since >= self._write_timeout_s and not self.stuck:
            self.stuck = True
            if self.on_stuck is not None:
                self.on_stuck()
