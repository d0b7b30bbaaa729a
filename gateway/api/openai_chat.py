"""POST /v1/chat/completions, as OpenAI's API has it."""

from gateway import sse
from gateway.api.logprobs import streamed_logprobs
from gateway.api.online import serve
from gateway.exchange import Exchange
from gateway.owned_request import OwnedRequest
from gateway.reader import Reader
from gateway.serving import Serving
from schemas.api.bodies import ChatCompletionBody
from schemas.api.prepare import Prepared


async def chat_completions(serving: Serving, exchange: Exchange) -> None:
    await serve(serving, exchange, ChatCompletionBody, _frames)


def _frames(owned: OwnedRequest, reader: Reader, prepared: Prepared) -> sse.Frames:
    request = owned.request
    return sse.ChatFrames(
        request.request_id,
        reader.model,
        request.accepted_at // 1000,
        prepared.include_usage,
        continuous_usage=prepared.num_prompt_tokens if prepared.continuous_usage else None,
        logprobs=streamed_logprobs(reader, prepared),
        service_tier=prepared.service_tier,
    )
