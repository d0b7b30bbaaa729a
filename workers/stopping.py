"""When a request has all its tokens, and which of them may be told already."""

from collections.abc import Set

from schemas.sampling import TokenLogprobs
from workers.request import FinishReason, Request, RequestOutput


class Stopping:
    """Books sampled tokens. Knows end tokens, lengths, stop strings and grammars."""

    def __init__(self, eos_token_ids: Set[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        # Of tokens that were not told yet, of requests that asked for them.
        self._held_logprobs: dict[Request, list[TokenLogprobs]] = {}

    def finish_reason(self, request: Request) -> FinishReason | None:
        """Whether the tokens so far are all there will be, stop strings aside."""
        output = request.output_token_ids
        if not output:
            return None
        last, sampling = output[-1], request.sampling
        stops = (last in self._eos_token_ids and not sampling.ignore_eos) or (
            sampling.stop_token_ids and last in sampling.stop_token_ids
        )
        # At one of the first min_tokens positions it does not end the output.
        if stops and len(output) > sampling.min_tokens:
            return FinishReason.STOP
        if len(output) >= request.max_output_tokens:
            return FinishReason.LENGTH
        return None

    def take(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None = None
    ) -> RequestOutput | None:
        """Appends the next token. None if there is nothing to tell yet.

        The finish reason in what is returned says that the request must end; it still runs.
        """
        constraint = request.constraint
        if constraint is not None:
            constraint.advance(token_id)
            if constraint.error:
                num_told = len(request.output_token_ids) - request.num_held_tokens
                return RequestOutput(request, num_told, [], FinishReason.ERROR, constraint.error)
        position = len(request.output_token_ids)
        request.output_token_ids.append(token_id)
        output = RequestOutput(request, position, [token_id], self.finish_reason(request))
        if logprobs is not None:
            output.logprobs = [logprobs]
        if request.stop_checker is not None:
            return self._hold_back(output)
        return output

    def forget(self, request: Request) -> None:
        """Drops what was held back of a request that ended."""
        self._held_logprobs.pop(request, None)

    def _hold_back(self, output: RequestOutput) -> RequestOutput | None:
        request = output.request
        checker = request.stop_checker
        assert checker is not None
        output.text_length = checker.push(output.token_ids[0])
        if output.text_length is not None:
            output.finish_reason = FinishReason.STOP
        was_held = request.num_held_tokens
        # What an earlier attempt has told is not held back any more.
        most = output.position + 1 - request.num_resumed_tokens
        held = request.num_held_tokens = 0 if output.finish_reason else min(checker.num_held, most)
        start, end = output.position - was_held, output.position + 1 - held
        output.position = start
        output.token_ids = request.output_token_ids[start:end]
        if output.logprobs or request in self._held_logprobs:
            logprobs = self._held_logprobs.pop(request, []) + output.logprobs
            output.logprobs = logprobs[: end - start]
            if held:
                self._held_logprobs[request] = logprobs[end - start :]
        return output if output.token_ids or output.finish_reason else None
