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
    request = first.owned.request
    return sse.CompletionFrames(
        request.request_id,
        choice.reader.model,
        request.accepted_at // 1000,
        choice.prepared.include_usage,
        continuous_usage=usage,
        logprobs=logprobs,
        index=index,
    )
