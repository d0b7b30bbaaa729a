"""POST /tokenize and /detokenize."""

from gateway.api.reading import answer_by_model
from gateway.exchange import Exchange
from gateway.serving import Serving
from schemas.api import tokenize as forms


async def tokenize(serving: Serving, exchange: Exchange) -> None:
    await answer_by_model(serving, exchange, forms.TokenizeBody, forms.tokenize)


async def detokenize(serving: Serving, exchange: Exchange) -> None:
    await answer_by_model(serving, exchange, forms.DetokenizeBody, forms.detokenize)
