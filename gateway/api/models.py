"""GET /v1/models and /v1/models/{id}, as OpenAI's API has them, or as Anthropic's for its clients.

Anthropic's clients say so: they send `anthropic-version` with everything.
"""

from datetime import UTC, datetime
from typing import Any

from gateway import sse
from gateway.api.pages import anthropic_page
from gateway.errors import is_anthropic
from gateway.exchange import Exchange
from gateway.serving import Serving
from schemas.api.errors import ApiError
from schemas.api.tenant_rules import check_model
from schemas.tenants import allows_model

_DEFAULT_PAGE, _MAX_PAGE = 20, 1_000


async def list_models(serving: Serving, exchange: Exchange) -> None:
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    ids = [model_id for model_id in sorted(serving.models) if allows_model(tenant, model_id)]
    if is_anthropic(exchange):
        await exchange.respond(200, sse.to_json(_page(serving, exchange, ids)))
        return
    models = [_model(serving, model_id) for model_id in ids]
    await exchange.respond(200, sse.to_json({"object": "list", "data": models}))


async def get_model(serving: Serving, exchange: Exchange) -> None:
    serving.check_open()
    tenant = await serving.authenticate(exchange.headers)
    model_id: str = exchange.scope["path_params"]["model"]
    if model_id not in serving.models:
        raise ApiError(404, "model_not_found", f"model {model_id!r} does not exist", "model")
    check_model(tenant, model_id)
    shape = _anthropic_model if is_anthropic(exchange) else _model
    await exchange.respond(200, sse.to_json(shape(serving, model_id)))


def _model(serving: Serving, model_id: str) -> dict[str, Any]:
    return {
        "id": model_id,
        "object": "model",
        "created": serving.models_loaded_at,
        "owned_by": "headrace",
        "max_model_len": serving.models[model_id].spec.max_model_len,
    }


def _anthropic_model(serving: Serving, model_id: str) -> dict[str, Any]:
    context = serving.models[model_id].spec.max_model_len
    created_at = datetime.fromtimestamp(serving.models_loaded_at, UTC)
    return {
        "type": "model",
        "id": model_id,
        "display_name": model_id,
        "created_at": created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def _page(serving: Serving, exchange: Exchange, ids: list[str]) -> dict[str, Any]:
    """A piece of the list. Raises ApiError that names the cursor or limit that does not fit."""
    page = anthropic_page(exchange, _DEFAULT_PAGE, _MAX_PAGE).cut(ids, ids)
    return page.anthropic([_anthropic_model(serving, model_id) for model_id in page.items])
