"""GET /v1/models and /v1/models/{id}, as OpenAI's API has them."""

from typing import Any

from gateway import sse
from gateway.exchange import Exchange
from gateway.serving import Serving
from schemas.api.errors import ApiError


async def list_models(serving: Serving, exchange: Exchange) -> None:
    serving.check_open()
    await serving.authenticate(exchange.headers)
    models = [_model(serving, model_id) for model_id in sorted(serving.models)]
    await exchange.respond(200, sse.to_json({"object": "list", "data": models}))


async def get_model(serving: Serving, exchange: Exchange) -> None:
    serving.check_open()
    await serving.authenticate(exchange.headers)
    model_id: str = exchange.scope["path_params"]["model"]
    if model_id not in serving.models:
        raise ApiError(404, "model_not_found", f"model {model_id!r} does not exist", "model")
    await exchange.respond(200, sse.to_json(_model(serving, model_id)))


def _model(serving: Serving, model_id: str) -> dict[str, Any]:
    return {
        "id": model_id,
        "object": "model",
        "created": serving.models_loaded_at,
        "owned_by": "headrace",
        "max_model_len": serving.models[model_id].spec.max_model_len,
    }
