"""Between the log and one HTTP client: what has come and is not yet written.

The log reader calls `on_bound`, `on_tokens`, `on_end` and never waits; the HTTP handler looks at what is
there and waits for more. Both run in one event loop.
"""

import asyncio
from collections.abc import Callable, Sequence

from gateway.metrics import Timing
from gateway.told_tokens import ToldTokens
from schemas.api.answers import visible_ids
from schemas.api.errors import ApiError
from schemas.records import Completion
from schemas.tokenization import Detokenizer

End = Completion | ApiError


class Reader:
    """A client that waits. `end` is the Completion of a normal end, or the error to tell the client.

    `model` is the one that serves, known when a run is bound. `told` takes the tokens' log probabilities, if
    the request asks for them; who calls `on_tokens` gives it those tokens first. `started_at` and `now` are
    monotonic seconds.
    """

    __slots__ = (
        "_last_tokens_at",
        "_started_at",
        "_timing",
        "_waiter",
        "bound",
        "disconnected",
        "end",
        "model",
        "told",
    )

    def __init__(self, model: str, timing: Timing, started_at: float) -> None:
        self.model = model
        self.bound = False
        self.disconnected = False
        self.end: End | None = None
        self.told: ToldTokens | None = None
        self._timing = timing
        self._started_at = started_at
        self._last_tokens_at: float | None = None
        self._waiter: asyncio.Future[None] | None = None

    def on_bound(self, model: str | None) -> None:
        self.bound = True
        self.model = model or self.model
        self._wake()

    def on_tokens(self, token_ids: Sequence[int], count: int, finish_reason: str | None, now: float) -> bool:
        """New output tokens; `count` is that of all so far. False: the client is too far behind."""
        raise NotImplementedError

    def on_end(self, end: End) -> None:
        """The first end counts."""
        if self.end is None:
            self.end = end
            self._wake()

    def on_disconnect(self) -> None:
        self.disconnected = True
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

    def _measure(self, now: float) -> None:
        last = self._last_tokens_at
        if last is None:
            self._timing.first.observe(now - self._started_at)
        else:
            self._timing.between.observe(now - last)
        self._last_tokens_at = now

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class WholeReader(Reader):
    """Waits for the end; `token_ids` are then all there are."""

    __slots__ = ("token_ids",)

    def __init__(self, model: str, timing: Timing, started_at: float) -> None:
        super().__init__(model, timing, started_at)
        self.token_ids: list[int] = []

    def on_tokens(self, token_ids: Sequence[int], count: int, finish_reason: str | None, now: float) -> bool:
        self._measure(now)
        self.token_ids += token_ids
        return True


class StreamReader(Reader):
    """Turns tokens into text as they come; what the client has not taken yet is one growing piece.

    `may_be_cut`: the request names stop strings. The worker tells no tokens beyond what may become one, but
    for those that end the output, so only these wait for the Completion. `cut_off` is then the text from the
    stop string on.

    `keep_alive_s` without an event makes `keep_alive_due`; so does `start_wait_s` of queueing at the
    beginning. A client that does not take what is there for `write_timeout_s` is `stuck`; `on_stuck` is
    called then, for a handler that waits in a send cannot look.
    """

    __slots__ = (
        "_chars",
        "_ending",
        "_ending_at",
        "_keep_alive_s",
        "_limit_chars",
        "_may_be_cut",
        "_pending",
        "_position",
        "_push",
        "_quiet_since",
        "_shown_chars",
        "_takes",
        "_takes_seen",
        "_untaken_since",
        "_write_timeout_s",
        "cut_off",
        "keep_alive_due",
        "on_stuck",
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
        limit_chars: int,
        start_wait_s: float,
        keep_alive_s: float,
        write_timeout_s: float,
    ) -> None:
        super().__init__(model, timing, started_at)
        self.cut_off = ""
        self.keep_alive_due = False
        self.stuck = False
        self.on_stuck: Callable[[], object] | None = None
        self._push = detokenizer.push
        self._pending: list[str] = []
        self._chars = 0
        self._position = 0
        self._may_be_cut = may_be_cut
        self._ending: list[int] = []
        self._ending_at = 0
        self._shown_chars = 0
        self._limit_chars = limit_chars
        self._keep_alive_s = keep_alive_s
        self._quiet_since = started_at + start_wait_s - keep_alive_s
        self._write_timeout_s = write_timeout_s
        self._takes = 0
        self._takes_seen = 0
        self._untaken_since = started_at

    def on_tokens(self, token_ids: Sequence[int], count: int, finish_reason: str | None, now: float) -> bool:
        self._measure(now)
        if finish_reason == "stop" and self._may_be_cut:
            # Where the text ends, if it was a stop string, stands in the Completion that follows.
            self._ending += token_ids
            self._ending_at = count - 1
            return True
        text = self._push(token_ids if finish_reason is None else visible_ids(token_ids, finish_reason))
        if text:
            self._position = count - 1
            self._add(text)
            if self._chars > self._limit_chars:
                return False
            self._quiet_since = now
            self._wake()
        return True

    def on_end(self, end: End) -> None:
        if self.end is None and isinstance(end, Completion) and self._ending:
            if end.text_length is None:
                text = self._push(visible_ids(self._ending, end.finish_reason))
            else:
                ending = self._push(self._ending)
                shown = max(0, end.text_length - self._shown_chars)
                text, self.cut_off = ending[:shown], ending[shown:]
            if text:
                self._position = self._ending_at
                self._add(text)
        super().on_end(end)

    def _add(self, text: str) -> None:
        self._pending.append(text)
        self._chars += len(text)
        self._shown_chars += len(text)

    def take(self) -> tuple[str, int] | None:
        """(text not yet taken, position of its last token), or None."""
        self._takes += 1
        pending = self._pending
        if not pending:
            return None
        text = pending[0] if len(pending) == 1 else "".join(pending)
        pending.clear()
        self._chars = 0
        return text, self._position

    def on_quiet(self, now: float) -> None:
        if now - self._quiet_since >= self._keep_alive_s:
            self._quiet_since = now
            self.keep_alive_due = True
            self._wake()
        untaken = bool(self._pending) or self.end is not None or self.keep_alive_due
        if not untaken or self._takes != self._takes_seen:
            self._takes_seen, self._untaken_since = self._takes, now
        elif now - self._untaken_since >= self._write_timeout_s and not self.stuck:
            self.stuck = True
            if self.on_stuck is not None:
                self.on_stuck()
