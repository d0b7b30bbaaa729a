"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's API has them."""

from gateway import sse
from gateway.api.online import serve
from gateway.api.reading import answer_by_model
from gateway.exchange import Exchange
from gateway.owned_request import OwnedRequest
from gateway.reader import Reader, StreamReader
from gateway.serving import Serving
from gateway.sse_anthropic import MessageFrames
from gateway.sse_tools import ToolMessageFrames
from schemas.api import messages as forms
from schemas.api.answers import stop_sequence
from schemas.api.prepare import Prepared
from schemas.records import Completion


async def messages(serving: Serving, exchange: Exchange) -> None:
    await serve(serving, exchange, forms.MessagesBody, _frames)


async def count_tokens(serving: Serving, exchange: Exchange) -> None:
    await answer_by_model(serving, exchange, forms.CountTokensBody, forms.count_tokens)


def _frames(owned: OwnedRequest, reader: Reader, prepared: Prepared) -> sse.Frames:
    assert isinstance(reader, StreamReader)

    def stopped_by(completion: Completion) -> str | None:
        return stop_sequence(reader.cut_off, prepared.sampling.stop)

    kind = ToolMessageFrames if prepared.has_tools else MessageFrames
    return kind(owned.answer_id, reader.model, prepared.num_prompt_tokens, stopped_by)
