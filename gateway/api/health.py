"""/health/live, /health/ready, /metrics."""

import time

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway import sse
from gateway.exchange import Exchange
from gateway.serving import Serving


async def live(serving: Serving, exchange: Exchange) -> None:
    await exchange.respond(200, b'{"status":"live"}')


async def ready(serving: Serving, exchange: Exchange) -> None:
    reasons = serving.not_ready(time.monotonic())
    if reasons:
        await exchange.respond(503, sse.to_json({"status": "not ready", "reasons": reasons}))
    else:
        await exchange.respond(200, b'{"status":"ready"}')


async def metrics(serving: Serving, exchange: Exchange) -> None:
    serving.metrics.open_requests.set(len(serving.owner.open) if serving.joined else 0)
    serving.metrics.in_flight.set(serving.in_flight.count)
    serving.metrics.body_bytes.set(serving.bodies.held)
    text = generate_latest(serving.metrics.registry)
    await exchange.respond(200, text, [(b"content-type", CONTENT_TYPE_LATEST.encode())])
