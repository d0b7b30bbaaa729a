"""POST /v1/chat/completions, as OpenAI's API has it."""

from functools import partial

from gateway import sse
from gateway.api.openai_choices import serve_choices
from gateway.choice_stream import Choice
from gateway.exchange import Exchange
from gateway.serving import Serving
from gateway.sse_tools import ToolChatFrames
from schemas.api.bodies import ChatCompletionBody


async def chat_completions(serving: Serving, exchange: Exchange) -> None:
    await serve_choices(serving, exchange, ChatCompletionBody, _chunks)


def _chunks(
    first: Choice, choice: Choice, index: int, usage: sse.UsageSoFar | None, logprobs: sse.Logprobs | None
) -> sse.OpenAIFrames:
    kind = partial(ToolChatFrames, choice.owned.answer_id) if choice.prepared.has_tools else sse.ChatFrames
    return kind(
        first.owned.answer_id,
        choice.reader.model,
        first.owned.answer_at_s,
        choice.prepared.include_usage,
        continuous_usage=usage,
        logprobs=logprobs,
        service_tier=choice.prepared.service_tier,
        index=index,
    )
