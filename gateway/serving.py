"""What the HTTP handlers share: the parts of a gateway and whether it takes requests."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gateway.actions import Announce, Cancel
from gateway.auth import TenantBook, presented_key
from gateway.config import GatewayConfig
from gateway.ends import DISCONNECTED, code_of
from gateway.errors import broker_unavailable
from gateway.file_store import FileStore
from gateway.idempotency import Joined
from gateway.in_flight import BodyBudget, InFlight
from gateway.log_scans import LogScans
from gateway.metrics import Metrics
from gateway.outbox import Outbox
from gateway.owned_request import OwnedRequest
from gateway.owner import Owner
from gateway.public_id import NotAnIdError, PublicId, PublicIds, hash_model
from gateway.reader import Reader
from gateway.replay import JoinedReplay
from gateway.stores import Stores
from gateway.stream_token import StreamTokens
from gateway.stream_writer import WriteBatch
from schemas.api.errors import ApiError
from schemas.fleet import HEARTBEAT_INTERVAL_S, FleetView
from schemas.models import LoadedModel
from schemas.offered_models import OfferedModels
from schemas.records import Attach, Cancellation, Completion, Detach, Duplicate, InferenceRequest, Tenant

log = logging.getLogger(__name__)

# A broker that restarts is back within this; requests queued meanwhile are answered then.
_DEAF_S = 5.0
# Looks, ten a second, in a row: counted and not timed, for a process that was held up has looked once.
_AWAY_LOOKS = int(_DEAF_S / HEARTBEAT_INTERVAL_S)
_LOOK_S = 0.05


class Serving:
    """`outbox`, `scans` and `owner` are there once the gateway has joined.

    `reply_offset(partition)` is where this gateway stands in a reply partition of its own.
    `catch_up_tenants` reads control.tenants to its end. `heard_at` is when heartbeats last came from Kafka
    (monotonic seconds): the log's clock, which judges all others, stands still with the broker.
    """

    outbox: Outbox
    scans: LogScans
    owner: Owner

    def __init__(self, config: GatewayConfig, catch_up_tenants: Callable[[], Awaitable[None]]) -> None:
        self.config = config
        self._catch_up_tenants = catch_up_tenants
        self.public_ids = PublicIds(config.stream_secret)
        self.stream_tokens = StreamTokens(config.stream_secret)
        self.reply_offset: Callable[[int], int] = lambda partition: 0
        self.metrics = Metrics()
        self.writes = WriteBatch()
        self.in_flight = InFlight(config.max_streams, config.max_streams_per_key)
        self.bodies = BodyBudget(config.max_bodies_bytes)
        self.files = FileStore(config.object_store, config.store_timeout_s)
        self.tenants = TenantBook()
        self.view = FleetView()
        self.offered = OfferedModels(config.models_dir, {})
        self.models_loaded_at = 0
        self.joined = False
        self.draining = False
        self.heard_at = 0.0
        self._silent_looks = 0
        self.readers: dict[bytes, Reader] = {}
        self._joins: dict[bytes, tuple[JoinedReplay, int]] = {}
        self._one_finished = asyncio.Event()
        self.stores = Stores(config, lambda: self.outbox.requests)
        # Tokenizing lets go of the GIL; two threads keep long prompts from one another.
        self.tokenizing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def check_open(self) -> None:
        """Raises ApiError 503 while no request can be taken."""
        if self.draining:
            raise ApiError(503, "draining", "this gateway is being stopped; try again", None, 1_000)
        if not self.joined:
            raise ApiError(503, "starting", "this gateway is still starting; try again", None, 1_000)

    async def authenticate(self, headers: Mapping[bytes, bytes]) -> Tenant:
        """The tenant that calls. Raises ApiError 401 or 403.

        A key that is not known may be new: control.tenants is read to its end before it is refused.
        """
        key = presented_key(headers)
        try:
            return self.tenants.authenticate(key)
        except ApiError as error:
            if error.status != 401:
                raise
        await self._catch_up_tenants()
        return self.tenants.authenticate(key)

    @property
    def models(self) -> Mapping[str, LoadedModel]:
        """Those that clients may ask for now, by id."""
        return self.offered.models

    def not_ready(self, now: float) -> list[str]:
        """Why a load balancer should not send requests here; empty when it should. `now`: monotonic s."""
        if self.draining:
            return ["draining"]
        if not self.joined:
            return ["starting: reading the control topics, loading models"]
        found = []
        if not self.models:
            found.append(f"no model in {self.config.models_dir}")
        if now - self.heard_at > _DEAF_S or not self.view.may_judge:
            found.append("its own heartbeats do not come back from Kafka")
        found += [f"no {role} is heard" for role in ("admission", "worker") if not self.view.live(role)]
        return found

    def hear(self, heard_at: float) -> None:
        """Looks, once each heartbeat interval or more often, when heartbeats last came."""
        self._silent_looks = 0 if heard_at != self.heard_at else self._silent_looks + 1
        self.heard_at = heard_at

    @property
    def broker_is_away(self) -> bool:
        """Kafka has been silent for so long that a request is better not queued."""
        return self._silent_looks >= _AWAY_LOOKS

    def expect_broker(self) -> None:
        """Raises ApiError 503 while the broker is away."""
        if self.broker_is_away:
            raise broker_unavailable()

    def public_id(self, request: InferenceRequest, described: bool = False, call_prefix: str = "") -> str:
        """Where the stream of a request is found that is not yet sent; for the rest see PublicId."""
        partition = request.reply_partition
        public_id = PublicId(
            reply_partition=partition,
            first_offset=self.reply_offset(partition),
            request_id=request.request_id,
            priority=request.priority,
            model_hash=hash_model(request.model),
            may_be_cut=bool(request.sampling.stop),
            described=described,
            call_prefix=call_prefix,
        )
        return self.public_ids.encode(request.tenant, public_id)

    def attach(self, request_id: bytes, reply_partition: int) -> None:
        """Tells the owner of a request, wherever it is, that a client here reads its stream."""
        word = Attach(request_id, self.owner.slot, self.owner.epoch)
        self.outbox.put([Announce(word, reply_partition)])

    def detach(self, request_id: bytes, reply_partition: int, detach_ms: int) -> None:
        """Tells it that one of them has gone, and how long it wants the request to go on unread."""
        word = Detach(request_id, self.owner.slot, self.owner.epoch, detach_ms)
        self.outbox.put([Announce(word, reply_partition)])

    def join(self, owned: OwnedRequest, record: Duplicate) -> None:
        """Shows its client the answer of the request that was first with its Idempotency-Key."""
        reader, request = owned.reader, owned.request
        if reader is None:
            return
        try:
            first = self.public_ids.decode(request.tenant, record.public_id)
            replay = JoinedReplay(first.request_id, request.tenant, reader)
            self.scans.follow(first.reply_partition, first.first_offset, replay)
        except NotAnIdError:
            message = "the answer of the request that was first with this Idempotency-Key cannot be read here"
            reader.on_end(ApiError(409, "idempotency_key_in_use", message))
            return
        except ApiError as e:
            reader.on_end(e)
            return
        owned.joined = Joined(record.public_id, first.request_id, record.accepted_at)
        owned.stream_id = record.public_id
        reader.heard = True  # Duplicate was all
        reader.on_news()
        self._joins[request.request_id] = replay, first.reply_partition
        self.attach(first.request_id, first.reply_partition)

    def leave_join(self, owned: OwnedRequest) -> None:
        """Its client wants no more of the answer that it joined."""
        replay, partition = self._joins.pop(owned.request.request_id)
        self.scans.leave(replay)
        self.detach(replay.request_id, partition, owned.detach_ms)
        asked = owned.request.idempotency
        if replay.waived and asked is not None:
            # Admission changed hands before it had read that: it is told once more.
            tenant = owned.request.tenant
            again = Cancellation(replay.request_id, 1, tenant, "refused", waived=True, key=asked.key)
            self.outbox.put([Cancel(again, owned.partition, behind_request=True)])

    def over(self, owned: OwnedRequest) -> None:
        """A request that this gateway owns has ended, whoever reads it."""
        state = owned.state
        early = state.may_retry or not isinstance(state.end, Completion)
        code = owned.cancelled if early and owned.cancelled is not None else code_of(state.end)
        self.metrics.ends.labels(code).inc()
        self.metrics.output_tokens.inc(len(state.token_ids))

    def accepted(self, owned: OwnedRequest, reader: Reader) -> None:
        self.readers[owned.request.request_id] = reader
        self.metrics.running_streams.inc()

    def finished(self, owned: OwnedRequest, reader: Reader, reason: str, elapsed_s: float) -> None:
        """The handler is done with its client. What still runs is cancelled for `reason`, unless that is
        DISCONNECTED and others read it or it has time to wait for its client."""
        request = owned.request
        self.readers.pop(request.request_id, None)
        self._one_finished.set()
        self.metrics.running_streams.dec()
        end = reader.end
        code = reason if end is None else code_of(end)
        if owned.joined is not None:
            self.leave_join(owned)
        elif end is None:
            self.owner.feel(time.monotonic())
            stop = self.owner.leave if reason == DISCONNECTED else self.owner.abandon
            self.outbox.put(stop(owned, reason))
        log.info(
            "request ended",
            extra={
                "request_id": request.request_id.hex(),
                "tenant": request.tenant,
                "model": reader.model,
                "priority": request.priority,
                "end": code,
                "output_tokens": end.output_tokens if isinstance(end, Completion) else None,
                "ms": round(elapsed_s * 1000, 1),
            },
        )

    async def idle(self) -> None:
        """Returns when no client waits. The caller sets a deadline."""
        while self.readers:
            self._one_finished.clear()
            await self._one_finished.wait()

    async def all_ended(self) -> None:
        """Returns when no request is open that a client may wait for, here, elsewhere, or later."""
        while self.readers or self.owner.open:
            self._one_finished.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._one_finished.wait()

    def end_all(self, error: ApiError, reason: str) -> None:
        """Ends what still runs, with an error for its client; but what others read, or may come back to, is
        left to another gateway."""
        self.scans.end_all(error)
        for reader in list(self.readers.values()):
            reader.on_end(error)
        for owned in list(self.owner.open.values()):
            self.outbox.put(self.owner.part(owned, reason))
