"""Rounds of faults under load, with the accounts after each round."""

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import httpx

from infra.benchmarks.hops import LogReader
from infra.chaos_run.accounts import ExpectedText, check_clients, check_log, reference_text, simulated_text
from infra.chaos_run.batch_load import BatchLoad
from infra.chaos_run.chaos_stack import ChaosStack, chaos_stack
from infra.chaos_run.faults import WRONG_TOKENS, Fault, restart_the_dead
from infra.chaos_run.impact import Hurt, impact
from infra.chaos_run.load import PROMPTS, Load
from infra.local.paths import PROJECT_ROOT
from schemas import topics
from schemas.clock import epoch_ms
from schemas.records import Retry

# Faults between two accounts: their requests are in memory, and no older than the log keeps them.
ROUND = 8
# What streams and items ask for, from and to, the lines of a file, and the seconds between a topic's records:
# of the simulated model and of the real one, which takes a hundred times as long.
_SIZES = ((60, 240), (4, 30), 24, 0.1)
_SMALL_SIZES = ((12, 24), (2, 4), 3, 5.0)
_WARM_S = 2.0
# How long all must be well after a fault, of the simulated model and of the real one; a token is waited for
# half of that.
_QUIET_S, _MODEL_QUIET_S = 1.5, 8.0
_RECOVERY_S = 90.0
_HUNG_S = 125.0
_HANDOFFS_OVER_S = 60.0
_PROBE_EVERY_S = 0.1
# The real model takes seconds for a token while others ask it too.
_PROBE_TIMEOUT_S = 10.0
_AFFECTED_STEPS = 20
Report = Callable[[str], None]


async def chaos_run(
    report: Report,
    rng: random.Random,
    faults: Mapping[str, Fault],
    *,
    seconds: float,
    in_order: bool,
    deterministic_model: bool,
    clients: int,
    step_ms: float,
    brokers: int = 1,
    disaggregated: bool = False,
) -> dict[str, Any]:
    """The figures of each fault and all that was found to be wrong. Faults come `in_order` once, else in any
    order and again until `seconds` are over."""
    async with chaos_stack(
        report,
        deterministic_model=deterministic_model,
        step_ms=step_ms,
        brokers=brokers,
        disaggregated=disaggregated,
    ) as chaos:
        tokens, item_tokens, lines, between_s = _SMALL_SIZES if deterministic_model else _SIZES
        expected: ExpectedText = simulated_text
        if deterministic_model:
            report("asking the model while nothing is done to it")
            expected = await reference_text(partial(_ask, chaos), PROMPTS, tokens[1])
        load = Load(chaos, rng, clients=clients, tokens=tokens, long_prompts=disaggregated)
        batch = BatchLoad(chaos, rng, item_tokens, lines, between_s, report)
        quiet_s = _MODEL_QUIET_S if deterministic_model else _QUIET_S
        run = _Run(report, rng, chaos, expected, load, batch, _AFFECTED_STEPS * step_ms, quiet_s)
        deadline = time.monotonic() + seconds
        waiting: list[str] = []
        while time.monotonic() < deadline:
            if not waiting:
                if in_order and run.hurts:
                    break
                waiting = list(faults)
                if not in_order:
                    rng.shuffle(waiting)
            some, waiting = waiting[:ROUND], waiting[ROUND:]
            await run.round({name: faults[name] for name in some}, deadline)
        return {
            "faults": run.figures,
            "requests": run.requests,
            "items": run.items,
            "audited": run.audited,
            "findings": run.findings,
        }


class _Run:
    def __init__(
        self,
        report: Report,
        rng: random.Random,
        chaos: ChaosStack,
        expected: ExpectedText,
        load: Load,
        batch: BatchLoad,
        affected_ms: float,
        quiet_s: float,
    ) -> None:
        self._report, self._rng, self._chaos, self._expected = report, rng, chaos, expected
        self._affected_ms, self._quiet_s = affected_ms, quiet_s
        self._load, self._batch = load, batch
        self.hurts: list[Hurt] = []
        self.figures: list[dict[str, Any]] = []
        self.findings: list[str] = []
        self.audited: Counter[str] = Counter()
        self.requests = 0
        self.items = 0

    async def round(self, faults: Mapping[str, Fault], deadline: float) -> None:
        config = self._chaos.stack.config
        log = LogReader(self._chaos.stack.bootstrap_servers, config.layout, (topics.TOKENS,))
        await log.mark()
        began_ms = epoch_ms()
        self._load.start()
        self._batch.start()
        await asyncio.sleep(_WARM_S)
        hurts = []
        for name, fault in faults.items():
            if time.monotonic() >= deadline:
                break
            hurts.append(await self._hurt(name, fault))
            self._report(
                f"{name} ({hurts[-1].what}): recovered, new requests waited {hurts[-1].unserved_ms:.0f} ms"
            )
        self.hurts += hurts
        self._report("accounts")
        await self._account(hurts, log, began_ms)

    async def _hurt(self, name: str, fault: Fault) -> Hurt:
        began, began_ms = time.perf_counter(), epoch_ms()
        async with _probing(self._chaos) as probe:
            try:
                what = await fault(self._chaos, self._rng)
            except TimeoutError:
                what = "it could not be done in time"
                self.findings.append(f"{name}: {what}")
            over = time.perf_counter()
            await self._settle(name, probe)
        return Hurt(
            name,
            what,
            began,
            over,
            time.perf_counter(),
            began_ms,
            epoch_ms(),
            probe.longest_ms(began),
        )

    async def _settle(self, name: str, probe: "_Probe") -> None:
        """Until all processes run and new requests are served, for a while."""
        quiet_since = time.monotonic()
        deadline = time.monotonic() + _RECOVERY_S
        while time.monotonic() - quiet_since < self._quiet_s:
            await asyncio.sleep(0.1)
            if await restart_the_dead(self._chaos) or probe.waits_s > self._quiet_s / 2:
                quiet_since = time.monotonic()
            if time.monotonic() > deadline:
                self.findings.append(f"{name}: not recovered after {_RECOVERY_S:g} s")
                return

    async def _account(self, hurts: list[Hurt], log: LogReader, began_ms: int) -> None:
        config = self._chaos.stack.config
        found = await self._load.stop(_HUNG_S)
        self._report(f"{len(self._load.records)} requests have ended")
        found += await self._batch.stop(_HUNG_S)
        self._report("batch work has ended")
        found += await _handoffs_over(self._chaos)
        records = self._load.records
        wrong = [(h.began, h.until) for h in hurts if h.fault == WRONG_TOKENS]
        found += check_clients(records, self._expected, wrong)
        audited, looked_at = await check_log(
            self._chaos.stack,
            began_ms,
            records,
            with_ids=self._expected is simulated_text,
            held_up_ms=int(max((hurt.unserved_ms for hurt in hurts), default=0.0)),
        )
        found += audited
        self.audited.update(looked_at)
        self._report(f"audited: {looked_at}")
        retried = [(record.request_id, at) for record, at in await log.read() if isinstance(record, Retry)]
        for hurt in hurts:
            figures = impact(hurt, records, self._affected_ms, retried)
            self._report(str(figures))
            self.figures.append(figures)
        for finding in found:
            self._report(f"FOUND {finding}")
        self.findings += found
        if found:
            kept = PROJECT_ROOT / ".headrace" / "chaos-logs"
            shutil.copytree(config.data_dir / "logs", kept, dirs_exist_ok=True)
            self._report(f"the processes' logs are kept in {kept}")
        self.requests += len(records)
        self.items += len(self._batch.records) + sum(len(items) for items in self._batch.files.values())
        records.clear()
        self._batch.clear()


async def _handoffs_over(chaos: ChaosStack) -> list[str]:
    """Waits until no worker has a transfer any more: what a run writes that was only silent may land when it
    wakes, and decode keeps the blocks till then."""
    config = chaos.stack.config
    if not config.hands_over:
        return []
    names = [f"worker-{slot}" for slot in range(config.workers)]
    live: dict[str, float] = {}
    deadline = time.monotonic() + _HANDOFFS_OVER_S
    async with httpx.AsyncClient(timeout=5.0) as client:
        while time.monotonic() < deadline:
            for name in names:
                with suppress(httpx.HTTPError):
                    page = (await client.get(f"{chaos.stack.url(name)}/metrics")).text
                    live[name] = _sample(page, "headrace_handoffs_live")
            if len(live) == len(names) and not any(live.values()):
                return []
            await asyncio.sleep(0.5)
    return [f"handoffs are not over after {_HANDOFFS_OVER_S:g} s: {live}"]


def _sample(page: str, name: str) -> float:
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return sum(float(value) for key, value in lines if key.split("{")[0] == name)


async def _ask(chaos: ChaosStack, prompt: str, tokens: int) -> str:
    headers = {"Authorization": f"Bearer {chaos.keys['interactive']}"}
    body = {"model": chaos.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body["ignore_eos"] = True
    async with httpx.AsyncClient(headers=headers, timeout=_HUNG_S) as client:
        answer = await client.post(f"{chaos.gateway_urls()[0]}/v1/generate", json=body)
        answer.raise_for_status()
        text: str = answer.json()["text"]
        return text


class _Probe:
    """Asks for one token again and again, at each gateway."""

    def __init__(self, chaos: ChaosStack) -> None:
        self._chaos = chaos
        self._answered: list[float] = [time.perf_counter()]

    @property
    def waits_s(self) -> float:
        return time.perf_counter() - self._answered[-1]

    def longest_ms(self, began: float) -> float:
        times = [began, *(at for at in self._answered if at > began)]
        return max((b - a for a, b in pairwise(times)), default=0.0) * 1000

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for slot in range(self._chaos.stack.config.gateways):
                group.create_task(self._ask(slot))

    async def _ask(self, slot: int) -> None:
        headers = {"Authorization": f"Bearer {self._chaos.keys['interactive']}"}
        body = {"model": self._chaos.model, "prompt": "probe", "max_tokens": 1}
        async with httpx.AsyncClient(headers=headers, timeout=_PROBE_TIMEOUT_S) as client:
            while True:
                try:
                    answer = await client.post(f"{self._chaos.gateway_urls()[slot]}/v1/generate", json=body)
                    if answer.status_code == 200:
                        self._answered.append(time.perf_counter())
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(_PROBE_EVERY_S)


@asynccontextmanager
async def _probing(chaos: ChaosStack) -> AsyncIterator[_Probe]:
    probe = _Probe(chaos)
    task = asyncio.create_task(probe.run())
    try:
        yield probe
    finally:
        task.cancel()
        await asyncio.wait([task])
