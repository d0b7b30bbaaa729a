"""/admin/v1/models: models offered, and taken back, while all run; for who has the administrator's key.

They are models of the catalogue, beside those that services were started with. If-Match is as in admin.py.
"""

import asyncio

from gateway import sse
from gateway.api.admin import asked_store, authorize, body_of, expected_version
from gateway.control_store import ModelStore
from gateway.exchange import JSON, Exchange
from gateway.serving import Serving
from schemas.api.errors import ApiError, bad_field
from schemas.api.model_admin import ModelOffer, view
from schemas.catalog import Catalog, CatalogError
from schemas.records import Model

ADMIN_MODELS_URL = "/admin/v1/models"


async def list_offered(serving: Serving, exchange: Exchange) -> None:
    found = await asked_store((await _store(serving, exchange)).all())
    data = [view(found[name].record, found[name].version) for name in sorted(found)]
    await exchange.respond(200, sse.to_json({"object": "list", "data": data}))


async def offer_model(serving: Serving, exchange: Exchange) -> None:
    """Says also which fallbacks a model has that is offered already."""
    store = await _store(serving, exchange)
    body = await body_of(serving, exchange, ModelOffer)
    model = Model(_name(exchange), body.fallback_models)
    await asyncio.to_thread(_check, serving, model)
    stored = await asked_store(store.edit(model.id, lambda known: model, expected_version(exchange)))
    assert stored is not None
    headers = [JSON, (b"etag", b'"%d"' % stored.version), (b"cache-control", b"no-store")]
    await exchange.respond(200, sse.to_json(view(stored.record, stored.version)), headers)


async def take_back_model(serving: Serving, exchange: Exchange) -> None:
    """What runs goes on. Services that were started with the model go on to offer it."""
    store = await _store(serving, exchange)
    name = _name(exchange)

    def gone(known: Model | None) -> None:
        if known is None:
            raise ApiError(404, "model_not_found", f"no model {name[:60]!r} was offered here")

    await asked_store(store.edit(name, gone, expected_version(exchange)))
    await exchange.respond(200, sse.to_json({"object": "model", "id": name, "deleted": True}))


def _check(serving: Serving, model: Model) -> None:
    """Raises ApiError where the catalogue has it not, or a fallback cannot serve for it."""
    catalog = Catalog.load(serving.config.models_dir)
    if model.id not in catalog.specs:
        raise ApiError(404, "model_not_found", f"the catalogue has no model {model.id[:60]!r}")
    try:
        catalog.check_fallbacks(model.id, model.fallback_models)
    except CatalogError as e:
        raise bad_field("fallback_models", str(e)) from None


async def _store(serving: Serving, exchange: Exchange) -> ModelStore:
    authorize(serving, exchange)
    return await asked_store(serving.stores.models())


def _name(exchange: Exchange) -> str:
    name: str = exchange.scope["path_params"]["model"]
    return name
