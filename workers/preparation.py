"""Between dispatch and engine: gives requests what their text is checked by."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from workers.live_requests import End, LiveRequest
from workers.request import FinishReason, Request
from workers.text_rules import TextRules

log = logging.getLogger(__name__)

# Output of earlier attempts that is searched for stop strings in the event loop: about 1 ms.
_MAX_READ_TOKENS = 500


class Preparation:
    """Compiles grammars, and searches long outputs for stop strings, in a thread of its own: that can take
    longer than a step, or than the event loop may stand still. All else is passed on at once.

    `add` gets a request that may run, `end` one that ended here. Both are called in the event loop.
    """

    def __init__(
        self, rules: TextRules, add: Callable[[Request], None], end: Callable[[LiveRequest, End], None]
    ) -> None:
        self._rules = rules
        self._add = add
        self._end = end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiling: dict[bytes, tuple[LiveRequest, asyncio.Task[None]]] = {}

    def start(self, live: LiveRequest) -> None:
        """Takes a request, in place of a lower attempt of it."""
        request = live.request
        self.forget(request.request_id)
        reads = request.sampling.stop and len(request.output_token_ids) > _MAX_READ_TOKENS
        if request.sampling.grammar is None and not reads:
            self._pass_on(live, self._rules.apply(request))
        else:
            self._compiling[request.request_id] = live, asyncio.create_task(self._compile(live))

    def cancel(self, request_id: bytes, attempt: int) -> None:
        """Ends the request as cancelled, if it is here with at most this attempt."""
        known = self._compiling.get(request_id)
        if known is not None and known[0].request.attempt <= attempt:
            self.forget(request_id)
            self._end(known[0], End(FinishReason.CANCELLED))

    def forget(self, request_id: bytes) -> None:
        """Drops the request without an end, if it is here."""
        if known := self._compiling.pop(request_id, None):
            known[1].cancel()

    def close(self) -> None:
        """Waits for nothing; what is here stays without an end."""
        for request_id in list(self._compiling):
            self.forget(request_id)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, live: LiveRequest) -> None:
        request = live.request
        end: End | None
        try:
            end = await asyncio.get_running_loop().run_in_executor(self._thread, self._rules.apply, request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic in the library is no Exception
            log.exception("a grammar could not be compiled", extra={"request_id": request.request_id})
            end = End(FinishReason.ERROR, f"grammar: the grammar library failed: {type(error).__name__}")
        del self._compiling[request.request_id]
        self._pass_on(live, end)

    def _pass_on(self, live: LiveRequest, end: End | None) -> None:
        if end is None:
            self._add(live.request)
        else:
            self._end(live, end)
