"""GET /v1/models and /v1/models/{id}, as OpenAI's API has them, or as Anthropic's for its clients.

Anthropic's clients say so: they send `anthropic-version` with everything.
"""

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from gateway import sse
from gateway.errors import is_anthropic
from gateway.exchange import Exchange
from gateway.serving import Serving
from schemas.api.errors import ApiError, bad_field
from schemas.api.tenant_rules import check_model
from schemas.tenants import allows_model

_DEFAULT_PAGE, _MAX_PAGE = 20, 1_000
_DIGITS = re.compile(r"[0-9]{1,6}")


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
    query = parse_qs(exchange.scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
    limit = query.get("limit", [str(_DEFAULT_PAGE)])[-1]
    if not _DIGITS.fullmatch(limit) or not 1 <= int(limit) <= _MAX_PAGE:
        raise bad_field("limit", f"an integer from 1 to {_MAX_PAGE}, not {limit[:40]!r}")
    after, before = (query.get(name, [""])[-1] for name in ("after_id", "before_id"))
    if after and before:
        raise bad_field("before_id", "give either after_id or before_id")
    for name, cursor in (("after_id", after), ("before_id", before)):
        if cursor and cursor not in ids:
            raise bad_field(name, f"there is no model {cursor[:80]!r}")
    if before:
        left = ids[: ids.index(before)]
        shown = left[-int(limit) :]
    else:
        left = ids[ids.index(after) + 1 :] if after else ids
        shown = left[: int(limit)]
    return {
        "data": [_anthropic_model(serving, model_id) for model_id in shown],
        "has_more": len(shown) < len(left),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }
