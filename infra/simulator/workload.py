"""Who asks for what and when, drawn from a scenario. The same seed gives the same requests.

Each traffic draws from random numbers of its own, so that a scenario with one more traffic has the same
requests of the others.
"""

import heapq
import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

import msgspec

from infra.simulator.scenario import Lengths, Prefixes, Scenario, Spike, Traffic
from schemas.priority import PriorityClass
from schemas.records import InferenceRequest, SamplingParams

# Token ids of shared prefixes, and from which on each request's own are: ids only have to differ.
FIRST_PREFIX_ID = 1 << 16
_FIRST_OWN_ID = 1 << 24


@dataclass(slots=True)
class Arrival:
    """A request as its client sends it. `num_output_tokens` is when the model ends it, if max_tokens do not.

    Its prompt is `num_prefix_tokens` that it shares with all of the same `prefix`, and tokens of its own.
    """

    at: float
    traffic: str
    tenant: str
    model: str
    priority: PriorityClass
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    start_ms: int | None = None
    end_ms: int = 600_000
    prefix: int = 0
    num_prefix_tokens: int = 0

    def request(self, number: int, accepted_at: int) -> InferenceRequest:
        """What its owner writes, as the request with this number. `accepted_at` in ms of the epoch."""
        return InferenceRequest(
            request_id=number.to_bytes(16, "little"),
            attempt=1,
            tenant=self.tenant,
            priority=self.priority,
            model=self.model,
            prompt_token_ids=self.prompt_token_ids(number),
            output_token_ids=[],
            sampling=SamplingParams(self.max_tokens),
            reply_partition=self.priority,
            owner_epoch=0,
            accepted_at=accepted_at,
            end_ms=self.end_ms,
            start_ms=self.start_ms,
        )

    def prompt_token_ids(self, number: int) -> list[int]:
        """The prompt of the request with this number."""
        shared = self.num_prefix_tokens
        own = [_FIRST_OWN_ID + number] * (self.num_prompt_tokens - shared)
        return [FIRST_PREFIX_ID + self.prefix] * shared + own if shared else own


class _TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    at: float
    prompt: int
    output: int


def arrivals(scenario: Scenario, folder: Path) -> Iterator[Arrival]:
    """All requests that arrive within the duration, by time. Raises ValueError for a bad line of a trace."""
    streams = [
        _traffic(scenario, name, traffic, folder, number)
        for number, (name, traffic) in enumerate(scenario.traffic.items())
    ]
    return heapq.merge(*streams, key=lambda arrival: arrival.at)


def length_sampler(lengths: Lengths, random: Random) -> Callable[[], int]:
    """Draws lengths in tokens, each within `least` and `most`."""
    least, most = lengths.least, lengths.most
    if lengths.fixed is not None:
        fixed = min(max(lengths.fixed, least), most)
        return lambda: fixed
    if lengths.lognormal is not None:
        mu, sigma = math.log(lengths.lognormal.median), lengths.lognormal.sigma
        return lambda: min(max(round(random.lognormvariate(mu, sigma)), least), most)
    assert lengths.histogram is not None
    ends = [end for end, _ in lengths.histogram]
    totals = list(accumulate(weight for _, weight in lengths.histogram))

    def draw() -> int:
        index = _pick(totals, random)
        start = ends[index - 1] + 1 if index else 1
        return min(max(random.randint(start, ends[index]), least), most)

    return draw


def _traffic(scenario: Scenario, name: str, traffic: Traffic, folder: Path, number: int) -> Iterator[Arrival]:
    random = Random(f"{scenario.seed} {name}")
    tenants, shares = list(traffic.tenants), list(accumulate(traffic.tenants.values()))
    priority = PriorityClass.parse(traffic.priority)
    draw_prefix = _prefix_sampler(traffic.prefixes, random)
    num_prefix_tokens = traffic.prefixes.tokens if traffic.prefixes else 0
    for at, num_prompt_tokens, num_output_tokens in _when_and_how_long(scenario, traffic, folder, random):
        yield Arrival(
            at,
            name,
            tenants[_pick(shares, random)] if len(tenants) > 1 else tenants[0],
            traffic.model,
            priority,
            max(num_prompt_tokens, num_prefix_tokens + 1),
            num_output_tokens,
            traffic.max_tokens or num_output_tokens,
            traffic.start_ms,
            traffic.end_ms,
            # Those of another traffic are others.
            (number << 16) + draw_prefix() if num_prefix_tokens else 0,
            num_prefix_tokens,
        )


def _when_and_how_long(
    scenario: Scenario, traffic: Traffic, folder: Path, random: Random
) -> Iterator[tuple[float, int, int]]:
    if traffic.trace is not None:
        yield from _trace(folder / traffic.trace, scenario.duration)
        return
    assert traffic.prompt is not None
    assert traffic.output is not None
    prompt, output = length_sampler(traffic.prompt, random), length_sampler(traffic.output, random)
    poisson = _poisson(traffic, scenario.duration, random)
    for at in heapq.merge(poisson, _bursts(traffic, scenario.duration)):
        yield at, prompt(), output()


def _trace(path: Path, duration: float) -> Iterator[tuple[float, int, int]]:
    last = 0.0
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            entry = msgspec.json.decode(line, type=_TraceLine)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if entry.at < last or min(entry.prompt, entry.output) < 1:
            raise ValueError(f"{path}, line {number}: at must ascend, prompt and output be at least 1")
        last = entry.at
        if last >= duration:
            return
        yield entry.at, entry.prompt, entry.output


def _poisson(traffic: Traffic, duration: float, random: Random) -> Iterator[float]:
    """Arrivals of a rate that changes, by thinning (Lewis and Shedler, 1979)."""
    peak = traffic.rate * _highest_spike(traffic.spikes)
    if not peak:
        return
    at = traffic.from_s
    while (at := at + random.expovariate(peak)) < duration:
        if random.random() * peak < _rate(traffic, at):
            yield at


def _highest_spike(spikes: list[Spike]) -> float:
    """How many times the rate there is at most; at least 1. It changes where a spike begins or ends."""
    changes = [at for spike in spikes for at in (spike.at, spike.until)]
    return max((math.prod(s.times for s in spikes if s.at <= at < s.until) for at in changes), default=1.0)


def _rate(traffic: Traffic, at: float) -> float:
    rate = traffic.rate
    for spike in traffic.spikes:
        if spike.at <= at < spike.until:
            rate *= spike.times
    if traffic.waves is not None:
        height = 0.5 - 0.5 * math.cos(2 * math.pi * at / traffic.waves.period)
        rate *= traffic.waves.low + (1 - traffic.waves.low) * height
    return rate


def _bursts(traffic: Traffic, duration: float) -> Iterator[float]:
    bursts = traffic.bursts
    if bursts is None:
        return
    number = 1
    while (at := traffic.from_s + number * bursts.every) < duration:
        yield from [at] * bursts.size
        number += 1


def _prefix_sampler(prefixes: Prefixes | None, random: Random) -> Callable[[], int]:
    if prefixes is None or prefixes.count == 1:
        return lambda: 0
    totals = list(accumulate(k**-prefixes.zipf for k in range(1, prefixes.count + 1)))
    return lambda: _pick(totals, random)


def _pick(totals: list[float], random: Random) -> int:
    """An index, by the running totals of the weights."""
    return bisect(totals, random.random() * totals[-1], 0, len(totals) - 1)
