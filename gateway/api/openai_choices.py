"""What OpenAI's two APIs that generate share: a body may ask for several choices."""

from collections.abc import Callable, Sequence
from typing import cast

from gateway.api.logprobs import streamed_logprobs
from gateway.api.online import answer_choices
from gateway.choice_stream import Choice, write_choices
from gateway.event_stream import write_events
from gateway.exchange import Exchange
from gateway.reader import StreamReader
from gateway.serving import Serving
from gateway.sse import Logprobs, OpenAIFrames, UsageSoFar
from schemas.api.bodies import ChatCompletionBody, decode_body
from schemas.api.completions import CompletionBody
from schemas.api.prepare import Prepared, prepare_choices

# first, choice, its index, usage so far, its log probabilities
MakeChunks = Callable[[Choice, Choice, int, UsageSoFar | None, Logprobs | None], OpenAIFrames]


async def serve_choices(
    serving: Serving,
    exchange: Exchange,
    kind: type[ChatCompletionBody] | type[CompletionBody],
    make_chunks: MakeChunks,
) -> None:
    """Answers, streaming or whole. Raises ApiError for a refusal, ClientGoneError."""

    def parse(data: bytes) -> list[Prepared]:
        return prepare_choices(decode_body(data, kind), serving.models)

    async def write(choices: Sequence[Choice]) -> None:
        readers = [cast(StreamReader, choice.reader) for choice in choices]

        def frames() -> list[OpenAIFrames]:
            usage = None
            if choices[0].prepared.continuous_usage:
                usage = UsageSoFar([choice.prepared.num_prompt_tokens for choice in choices])
            return [
                make_chunks(choices[0], choice, i, usage, streamed_logprobs(choice.reader, choice.prepared))
                for i, choice in enumerate(choices)
            ]

        if len(readers) == 1:
            await write_events(exchange, readers[0], lambda: frames()[0])
        else:
            await write_choices(exchange, readers, frames)

    await answer_choices(serving, exchange, parse, write)
