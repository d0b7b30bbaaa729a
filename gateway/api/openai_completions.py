"""POST /v1/completions, as OpenAI's API has it."""

from gateway import sse
from gateway.api.openai_choices import serve_choices
from gateway.choice_stream import Choice
from gateway.exchange import Exchange
from gateway.serving import Serving
from schemas.api.completions import CompletionBody


async def completions(serving: Serving, exchange: Exchange) -> None:
    await serve_choices(serving, exchange, CompletionBody, _chunks)


def _chunks(
    first: Choice, choice: Choice, index: int, usage: sse.UsageSoFar | None, logprobs: sse.Logprobs | None
) -> sse.OpenAIFrames:
    return sse.CompletionFrames(
        first.owned.answer_id,
        choice.reader.model,
        first.owned.answer_at_s,
        choice.prepared.include_usage,
        continuous_usage=usage,
        logprobs=logprobs,
        index=index,
    )
