"""A known prompt through the engine, again and again: a worker that computes wrong takes itself out.

It is an ordinary request to the engine, but that nobody has to give up a seat for it, and nothing to the
rest: nobody is told of its tokens or billed for them. Pure: the engine is given, time is not asked.
"""

import logging
from collections.abc import Sequence

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.engine import Engine
from workers.request import FinishReason, Request, RequestOutput

log = logging.getLogger(__name__)

NO_CANARY = -1
"""In the place of the number of a run: there are none."""
CANARY_REQUEST_ID = b"headrace-canary\0"
# Shared by nobody: the canary must not stand still with a reply partition that does.
_REPLY_PARTITION = -1
# Of a run whose right tokens are not known yet.
NUM_LEARNED_TOKENS = 8
# With as much between a token and the runner-up (natural log of the odds), other batch mates and the number
# formats of the fast mode, whose logits are off by some tenths, do not change it.
_WIDE_MARGIN = 2.0


class CanaryFailedError(RuntimeError):
    """The engine computes something else than it should: nothing that it gave can be relied on."""


class Canary:
    """At most one run at a time. `known` are the right output tokens; None until a first run was taken for
    right.

    `num_begun` runs have begun; `passed` is the number of the last that came to a good end, 0 if none has.
    The first run of an engine counts as any.

    A run that ends early, because the engine refused it or its place was taken, says nothing.
    """

    def __init__(self, prompt_token_ids: Sequence[int], known: Sequence[int] | None = None) -> None:
        self.known = None if known is None else list(known)
        self._prompt_token_ids = list(prompt_token_ids)
        self.num_begun = 0
        self.passed = 0
        self._running: Request | None = None
        self._found: list[int] = []

    def first_run(self, engine: Engine) -> None:
        """Drives an engine that is not served yet. Raises CanaryFailedError."""
        learning = self.known is None
        request = self._make_request(logprobs=2 if learning else None)
        outputs = engine.add_request(request)
        while engine.scheduler.has_requests:
            outputs += engine.step()[1]
        for output in outputs:
            if learning:
                self._found += output.token_ids
            else:
                self.on_output(output)
        if request.finish_reason is not FinishReason.LENGTH:
            raise CanaryFailedError(f"the canary was refused by an idle engine: {outputs[-1].error}")
        if learning:
            chosen = [logprobs.top_logprobs for output in outputs for logprobs in output.logprobs]
            self._learn([first - second for first, second, *_ in chosen])

    def next_run(self) -> Request | None:
        """What to add to the engine now; None while the last one is there still, or nothing is known."""
        if self._running is not None or not self.known:
            return None
        return self._make_request()

    def on_output(self, output: RequestOutput) -> None:
        """Takes what any request gave that is not live. Raises CanaryFailedError at the first wrong token."""
        if output.request is not self._running:
            return
        assert self.known is not None
        self._found += output.token_ids
        found, known = self._found, self.known
        if found[: len(known)] != known[: len(found)]:
            raise CanaryFailedError(f"the canary gave the tokens {found}, right are {known}")
        if output.finish_reason is not None:
            self._running = None
            if output.finish_reason is FinishReason.LENGTH:
                self.passed = self.num_begun
            else:
                reason = {"reason": str(output.finish_reason), "error": output.error}
                log.warning("the canary did not run", extra=reason)

    def _make_request(self, logprobs: int | None = None) -> Request:
        num_tokens = NUM_LEARNED_TOKENS if self.known is None else len(self.known)
        self._found = []
        self.num_begun += 1
        self._running = Request(
            request_id=CANARY_REQUEST_ID,
            attempt=0,  # any real attempt of such an id would go first
            priority=PriorityClass.INTERACTIVE,
            prompt_token_ids=list(self._prompt_token_ids),
            sampling=SamplingParams(num_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs),
            reply_partition=_REPLY_PARTITION,
            expected_output_tokens=num_tokens,
            num_seats=0,
        )
        return self._running

    def _learn(self, margins: Sequence[float]) -> None:
        self._running = None
        narrow = next((i for i, margin in enumerate(margins) if margin < _WIDE_MARGIN), len(self._found))
        self.known = self._found[:narrow]
        if self.known:
            log.info("took the canary's first tokens for right", extra={"token_ids": self.known})
        else:
            log.warning("no canary: its first token is a near tie; give the model one in model.json")
