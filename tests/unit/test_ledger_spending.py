"""What is told of a tenant's spend is the sum of its bill, whatever comes in whatever order, whoever dies."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import topics
from schemas.budgets import month_of, spend_key
from schemas.codec import decode
from schemas.records import Amount, Budget, Spend, Tenant, Usage
from streams.ledger.billing import UsageRow, billed, row_of
from streams.ledger.spend_teller import Scope, SpendTeller
from streams.ledger.spending import AlertRow, Spending, Sums

NOW = 1_793_000_000_000
MONTH = month_of(NOW)
BUDGETS = {"acme": Budget("0.001", "USD", [50, 100]), "other": Budget("1", "USD", [80])}
PRICES = {"m": Decimal("1.5"), "n": Decimal("0.25")}


class Death(Exception):
    """The process dies here."""


@dataclass
class World:
    """What outlives a process: the tables, the topic and what operators heard. `deaths`: after so many calls
    that change it, one after another."""

    deaths: list[int] = field(default_factory=list)
    rows: list[UsageRow] = field(default_factory=list)
    alerts: list[AlertRow] = field(default_factory=list)
    topic: list[Spend] = field(default_factory=list)

    def spend(self, tenants: Sequence[str], months: Sequence[str]) -> Sums:
        found: dict[tuple[str, str], dict[str, Decimal]] = {}
        for row in billed(self.rows).values():
            key = (row.tenant, f"{row.accepted_at:%Y-%m}")
            if row.tenant in tenants and key[1] in months and row.model in PRICES:
                cost = PRICES[row.model] * (row.input_tokens + row.output_tokens) / 1_000_000
                sums = found.setdefault(key, {})
                sums["USD"] = sums.get("USD", Decimal(0)) + cost
        return found

    def insert_alerts(self, rows: Sequence[AlertRow]) -> None:
        self._step()
        self.alerts += rows
        self._step()

    async def send_and_wait(self, topic: str, value: bytes, *, key: bytes, partition: int) -> None:
        self._step()
        spend = decode(value)
        assert (topic, partition) == (topics.SPEND, 0)
        assert isinstance(spend, Spend)
        assert key.decode() == spend_key(spend.tenant, spend.month)
        self.topic.append(spend)
        self._step()

    def close(self) -> None: ...

    def _step(self) -> None:
        if self.deaths:
            self.deaths[0] -= 1
            if not self.deaths[0]:
                self.deaths.pop(0)
                raise Death

    def begin(self) -> "Process":
        return Process(self)


class Process:
    def __init__(self, world: World) -> None:
        self.world, self.spending = world, Spending()
        for name, budget in BUDGETS.items():
            self.spending.put_tenant(name, Tenant(name, 0, [], [], budget=budget))
        self.num_read = 0
        self.read()
        scope = Scope(lambda tenant: True, lambda tenant: False)
        self.teller = SpendTeller(self.spending, world, world, scope, 1.0)

    def read(self) -> None:
        for spend in self.world.topic[self.num_read :]:
            self.spending.put_spend(spend_key(spend.tenant, spend.month), spend)
        self.num_read = len(self.world.topic)

    def store(self, rows: list[UsageRow]) -> None:
        self.world.rows += rows
        self.spending.touched({row.tenant for row in rows})

    async def tell(self) -> bool:
        """Whether it lives on."""
        try:
            await self.teller.tell(NOW)
        except Death:
            self.teller.close()
            return False
        return True


def usage(n: int, tenant: str = "acme", model: str = "m", tokens: int = 100, attempt: int = 1) -> Usage:
    return Usage(bytes([n] * 16), attempt, False, tenant, 0, model, tokens, 0, 7, "stop", NOW, NOW + 9, 0, 1)


usages = st.builds(
    usage,
    st.integers(0, 20),
    st.sampled_from(["acme", "acme", "other", "unlimited"]),
    st.sampled_from(["m", "n", "unpriced"]),
    st.integers(0, 400),
    attempt=st.integers(1, 3),
)


@given(
    st.lists(st.lists(usages, max_size=6), max_size=8),
    st.lists(st.integers(1, 5), max_size=4),
    st.integers(0, 3),
)
def test_what_is_told_is_the_bill_and_each_threshold_is_told_once(
    batches: list[list[Usage]], deaths: list[int], replays: int
) -> None:
    world, said = World(list(deaths)), list[tuple[str, str]]()

    class Ears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg == "budget alert":
                said.append((record.__dict__["tenant"], record.__dict__["threshold"]))

    async def play() -> None:
        process = world.begin()
        for batch in [*batches, *batches[:replays]]:
            process.store([row_of(each) for each in batch])
            while not await process.tell():
                process = world.begin()
            process.read()
        world.deaths.clear()
        await process.tell()
        process.teller.close()

    log, ears = logging.getLogger("streams.ledger.spend_teller"), Ears()
    log.addHandler(ears)
    try:
        asyncio.run(play())
    finally:
        log.removeHandler(ears)
    last = {spend.tenant: spend for spend in world.topic}
    sums = world.spend(list(BUDGETS), [MONTH])
    assert {name for name, _ in sums} == last.keys()
    for (name, _), found in sums.items():
        (amount,) = last[name].amounts
        assert Decimal(amount.amount) == found["USD"]
    # What operators ask for is in one row, and what they heard they heard once.
    named = {(spend.tenant, key) for spend in world.topic for key in spend.alerted}
    assert {
        (row.tenant, f"{Decimal(row.threshold).normalize():f} {row.currency}") for row in world.alerts
    } == named
    assert len(said) == len(set(said)) <= len(named)


async def test_news_of_others_is_asked_for_and_theirs_is_not_told() -> None:
    world = World()
    process = world.begin()
    spending = process.spending
    assert spending.take_due(lambda name: name == "acme", lambda name: False) == ["acme"]
    assert spending.take_due(lambda name: True, lambda name: False) == []
    assert spending.take_due(lambda name: True, lambda name: name == "other") == ["other"]
    process.teller.close()


async def test_a_word_that_another_process_says_late_is_put_right() -> None:
    world = World()
    process = world.begin()
    process.store([row_of(usage(n)) for n in range(3)])
    assert await process.tell()
    process.read()
    told = len(world.topic)
    assert await process.tell()
    assert len(world.topic) == told
    late = Spend("acme", MONTH, [Amount("USD", "0")], [])
    world.topic.append(late)
    process.read()
    assert await process.tell()
    assert world.topic[-1] == world.topic[0] != late
    process.teller.close()


async def test_a_budget_that_is_raised_has_thresholds_of_its_own() -> None:
    world = World()
    process = world.begin()
    for amount in ("0.0001", "0.001", "0.0001"):
        budget = Budget(amount, "USD", [100])
        process.spending.put_tenant("acme", Tenant("acme", 0, [], [], budget=budget))
        process.store([row_of(usage(n)) for n in range(8)])
        assert await process.tell()
        process.read()
    process.teller.close()
    assert world.topic[-1].alerted == ["0.0001 USD", "0.001 USD"]
    assert [row.threshold for row in world.alerts] == ["0.0001", "0.001"]


async def test_a_budget_taken_away_is_told_of_no_more() -> None:
    world = World()
    process = world.begin()
    process.spending.put_tenant("acme", None)
    process.spending.put_tenant("other", Tenant("other", 0, [], []))
    process.store([row_of(usage(1))])
    assert await process.tell()
    assert world.topic == []
    with pytest.raises(ValueError, match=r"budget\.amount"):
        process.spending.put_tenant("acme", Tenant("acme", 0, [], [], budget=Budget("?", "USD", [])))
    process.teller.close()
