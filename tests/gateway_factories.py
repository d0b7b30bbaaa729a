"""A gateway over raw ASGI, with an outbox that keeps what it is given. Kafka is in integration/."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from aiokafka import ConsumerRecord

from gateway.actions import Action
from gateway.app import make_app
from gateway.batch_book import BatchBook
from gateway.batch_log import BatchLog
from gateway.config import GatewayConfig
from gateway.exchange import Message
from gateway.log_scans import LogScans
from gateway.outbox import Outbox
from gateway.owned_request import OwnedRequest
from gateway.owner import Owner
from gateway.serving import Serving
from schemas.api_keys import new_key
from schemas.catalog import Catalog
from schemas.codec import decode
from schemas.models import LoadedModel
from schemas.offered_models import OfferedModels
from schemas.priority import PriorityClass
from schemas.records import (
    Completion,
    Described,
    Dispatched,
    InferenceRequest,
    Rejected,
    SamplingParams,
    Tenant,
    TokenLogprobs,
    Tokens,
)
from schemas.token_records import TokenChunk

MODEL = LoadedModel.load(Catalog.load(Path("no-models")), "simulated")
KEY, _API_KEY = new_key(0)
FREE_KEY, _FREE_API_KEY = new_key(0)
DISABLED_KEY, _DISABLED_API_KEY = new_key(0)
TENANTS = [
    Tenant("acme", PriorityClass.INTERACTIVE, [_API_KEY], []),
    Tenant("cheap", PriorityClass.FREE, [_FREE_API_KEY], []),
    Tenant("off", PriorityClass.FREE, [_DISABLED_API_KEY], [], disabled=True),
]
SLOT, EPOCH, WORKER_EPOCH = 1, 70, 55
NOWHERE = "nowhere:1"


class RecordingOutbox(Outbox):
    """Acks every request at once, or raises `error`; keeps the actions, which are `acked`; `on_request` may
    answer."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.sent: list[OwnedRequest] = []
        self.descriptions: list[Described] = []
        self.acked = asyncio.Event()
        self.acked.set()
        self.arrived = asyncio.Event()
        self.error: Exception | None = None
        self.on_request: Callable[[OwnedRequest], None] | None = None

    def put(self, actions: Iterable[Action]) -> None:
        self.actions += actions

    async def send_request(self, owned: OwnedRequest, timeout_s: float) -> int:
        if self.error is not None:
            raise self.error
        self.sent.append(owned)
        self.arrived.set()
        if self.on_request is not None:
            asyncio.get_running_loop().call_soon(self.on_request, owned)
        return len(self.sent) - 1

    async def drained(self) -> None:
        await self.acked.wait()

    async def send_description(self, description: Described, reply_partition: int, timeout_s: float) -> None:
        if self.error is not None:
            raise self.error
        self.descriptions.append(description)


class UnwrittenBatches(BatchLog):
    """Batches as one gateway alone knows them; the log is in test_gateway_batches.py."""

    failed = False

    def __init__(self) -> None:
        self.book = BatchBook()

    async def stop(self) -> None:
        pass

    async def catch_up(self, tenant: str) -> None:
        pass

    async def _append(self, tenant: str, key: str, value: bytes | None) -> None:
        pass


def config(**changes: Any) -> GatewayConfig:
    return GatewayConfig(**{"kafka": NOWHERE, "slot": SLOT, "models": "simulated", **changes})


class Stand:
    """A joined gateway without Kafka: `call` makes requests, the other methods are admission and worker."""

    def __init__(self, **changes: Any) -> None:
        self.catch_ups = 0
        self.late_tenants: list[Tenant] = []
        self.serving = Serving(config(**changes), self._catch_up_tenants)
        self.outbox = RecordingOutbox()
        self.serving.outbox = self.outbox
        self.serving.scans = LogScans(NOWHERE, self._decode, lambda: 0, most=2, kept_bytes=1 << 20)
        self.serving.owner = Owner(SLOT, EPOCH, shards=4, cancel_timeout_ms=30_000)
        self.serving.owner.on_over = self.serving.over
        self.serving.offered = OfferedModels(Path(), {"simulated": MODEL})
        self.serving.joined = True
        if self.serving.config.kafka == NOWHERE:
            self.serving.stores._batches._store = UnwrittenBatches()
        for tenant in TENANTS:
            self.serving.tenants.put(tenant.name, tenant)
        self.app = make_app(self.serving)

    def call(self, method: str = "POST", path: str = "/v1/generate", **options: Any) -> "Call":
        return Call(self.app, method, path, **options)

    async def _decode(self, message: ConsumerRecord) -> object:
        return decode(message.value or b"")

    async def _catch_up_tenants(self) -> None:
        self.catch_ups += 1
        for tenant in self.late_tenants:
            self.serving.tenants.put(tenant.name, tenant)

    async def request(self) -> InferenceRequest:
        async with asyncio.timeout(5):
            await self.outbox.arrived.wait()
        self.outbox.arrived.clear()
        return self.outbox.sent[-1].request

    def dispatched(self, request: InferenceRequest) -> None:
        self.tell(Dispatched(request.request_id, 1, EPOCH, slot=0, epoch=WORKER_EPOCH, model=request.model))

    def tokens(
        self,
        request: InferenceRequest,
        position: int,
        ids: Iterable[int],
        finish: str | None = None,
        logprobs: Iterable[TokenLogprobs] = (),
    ) -> None:
        chunk = TokenChunk(request.request_id, 1, position, list(ids), finish, list(logprobs))
        self.outbox.put(self.serving.owner.on_tokens(Tokens.of(0, WORKER_EPOCH, [chunk]), 0, 0.0))

    def complete(
        self, request: InferenceRequest, count: int, finish: str = "length", text_length: int | None = None
    ) -> None:
        inputs = len(request.prompt_token_ids)
        self.tell(Completion(request.request_id, 1, 0, WORKER_EPOCH, inputs, 0, count, finish, text_length))

    def reject(self, request: InferenceRequest, status: int, code: str, retry_after_ms: int | None) -> None:
        self.tell(Rejected(request.request_id, 1, status, code, f"no: {code}", retry_after_ms))

    def tell(self, record: Any) -> None:
        self.outbox.put(self.serving.owner.on_record(record, 0))


class Call:
    """One request over raw ASGI. `sent` are the messages of the response."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        method: str,
        path: str,
        *,
        body: object = None,
        key: str | None = KEY,
        headers: Iterable[tuple[bytes, bytes]] = (),
        parts: Iterable[bytes] | None = None,
        hang: bool = False,
        query: bytes = b"",
        extra_scope: Mapping[str, Any] | None = None,
    ) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.sent: list[Message] = []
        self.changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._parts = list(parts) if parts is not None else [content]
        self._hang = hang
        auth = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query,
            "headers": [*auth, *headers],
            **(extra_scope or {}),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._parts and not self._gone.is_set():
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts) or self._hang}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if not self._gone.is_set():
            self.sent.append(dict(message))
            self.changed.set()

    def disconnect(self) -> None:
        self._gone.set()

    async def finish(self) -> "Call":
        async with asyncio.timeout(5):
            await self.task
        return self

    async def until_started(self) -> None:
        async with asyncio.timeout(5):
            while not self.sent:
                self.changed.clear()
                await self.changed.wait()

    async def until_body(self, text: bytes) -> None:
        async with asyncio.timeout(5):
            while text not in self.content:
                self.changed.clear()
                await self.changed.wait()

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def content(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    def json(self) -> Any:
        return json.loads(self.content)


def inference_request(
    request_id: bytes = bytes(16), prompt: Iterable[int] = (256, 72, 105), **changes: Any
) -> InferenceRequest:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 1,
        "tenant": "acme",
        "priority": 0,
        "model": "simulated",
        "prompt_token_ids": list(prompt),
        "output_token_ids": [],
        "sampling": SamplingParams(max_tokens=10),
        "reply_partition": 3,
        "owner_epoch": EPOCH,
        "accepted_at": 1_000,
        "end_ms": 600_000,
    }
    return InferenceRequest(**{**fields, **changes})
