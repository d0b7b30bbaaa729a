"""control.schemas, .tenants, .models, .prices and .spend, and fleet.events, from their beginning."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from schemas import topics
from schemas.budgets import check_spend
from schemas.codec import CodecError, default_codec
from schemas.control_log import ControlLog
from schemas.prices import check_price
from schemas.records import Model, Price, Spend, Tenant
from streams.consumer import Consumer, assign_at, decoded, find_leaders
from streams.membership import Membership

log = logging.getLogger(__name__)

_POLL_MS = 1_000
R = TypeVar("R", Tenant, Model, Price, Spend)


class ControlFollower:
    """`on_tenant(name, tenant)`, with None for a deletion, may raise ValueError: the record is skipped.
    `on_model(id, model)` and `on_price(key, price, offset)` and `on_spend(key, spend)` likewise. A price that
    is told can be billed by, what was spent can be believed; who asks for neither does not read them.
    """

    def __init__(
        self,
        consumer: Consumer,
        partition: Callable[[str, int], Any],
        membership: Membership,
        on_tenant: Callable[[str, Tenant | None], None],
        on_model: Callable[[str, Model | None], None],
        on_price: Callable[[str, Price | None, int], None] | None = None,
        on_spend: Callable[[str, Spend | None], None] | None = None,
    ) -> None:
        self._consumer, self._membership = consumer, membership
        self._on_tenant, self._on_model, self._on_price = on_tenant, on_model, on_price
        self._on_spend = on_spend
        self._schemas, self._tenants = partition(topics.SCHEMAS, 0), partition(topics.TENANTS, 0)
        models = partition(topics.MODELS, 0)
        self._all = [self._schemas, self._tenants, models, partition(topics.EVENTS, 0)]
        if on_price is not None:
            self._all.append(partition(topics.PRICES, 0))
        if on_spend is not None:
            self._all.append(partition(topics.SPEND, 0))
        self._moved = asyncio.Event()
        self._tenant_log, self._model_log, self._price_log = ControlLog(), ControlLog(), ControlLog()
        self._spend_log = ControlLog()

    async def read_to_end(self) -> None:
        """Returns when all that was there is applied. The caller sets a deadline."""
        await find_leaders(self._consumer, *self._all)
        ends = await self._consumer.end_offsets(self._all)
        assign_at(self._consumer, await self._consumer.beginning_offsets(self._all))
        # Schemas first: the other records may be of newer writers.
        for partition in self._all:
            while await self._consumer.position(partition) < ends[partition]:
                self._apply(await self._consumer.getmany(partition, timeout_ms=_POLL_MS))

    async def run(self) -> None:
        while True:
            self._apply(await self._consumer.getmany(timeout_ms=_POLL_MS))

    async def catch_up_schemas(self, timeout: float = 2.0) -> None:
        """Returns when `run` has read what control.schemas holds now, or after `timeout` seconds."""
        await self._catch_up(self._schemas, timeout)

    async def catch_up_tenants(self, timeout: float = 2.0) -> None:
        """Returns when `run` has read what control.tenants holds now, or after `timeout` seconds."""
        await self._catch_up(self._tenants, timeout)

    async def _catch_up(self, partition: Any, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                end = (await self._consumer.end_offsets([partition]))[partition]
                while await self._consumer.position(partition) < end:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            log.warning("%s was not read to its end in %.1f s", partition.topic, timeout)

    def _apply(self, batch: dict[Any, list[Any]]) -> None:
        for partition in self._all:
            records = batch.get(partition, [])
            match partition.topic:
                case topics.SCHEMAS:
                    for record in records:
                        _learn(record)
                case topics.TENANTS:
                    for record in records:
                        self._take(record, self._tenant_log, Tenant, self._on_tenant)
                case topics.MODELS:
                    for record in records:
                        self._take(record, self._model_log, Model, self._on_model)
                case topics.PRICES:
                    for record in records:
                        self._take(record, self._price_log, Price, self._tell_price(record.offset))
                case topics.SPEND:
                    for record in records:
                        self._take(record, self._spend_log, Spend, self._tell_spend)
                case topics.EVENTS if records:
                    self._membership.on_events(records)
        self._moved.set()

    def _tell_price(self, offset: int) -> Callable[[str, Price | None], None]:
        def tell(key: str, price: Price | None) -> None:
            assert self._on_price is not None, "prices are read only where they are asked for"
            self._on_price(key, None if price is None else check_price(key, price), offset)

        return tell

    def _tell_spend(self, key: str, spend: Spend | None) -> None:
        assert self._on_spend is not None, "spend is read only where it is asked for"
        self._on_spend(key, None if spend is None else check_spend(key, spend))

    def _take(
        self, record: Any, control_log: ControlLog, kind: type[R], take: Callable[[str, R | None], None]
    ) -> None:
        name = (record.key or b"").decode(errors="replace")
        if not control_log.counts(name, record.offset, record.headers, record.value is None):
            return
        found = None if record.value is None else decoded(record, kind)
        if found is None and record.value is not None:
            return
        try:
            take(name, found)
        except ValueError as error:
            log.warning("%s offset %d: %s", record.topic, record.offset, error)


def _learn(record: Any) -> None:
    try:
        default_codec().learn((record.value or b"").decode(errors="replace"))
    except CodecError as error:
        log.warning("control.schemas offset %d: %s", record.offset, error)
