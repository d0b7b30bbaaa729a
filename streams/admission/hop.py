"""Whether a prompt is computed at a prefill slot and its KV sent on, or where the request is decoded. Pure.

At the decode slot, and by way of a prefill slot, a request costs (times in ms)

    here = (queue_d + n_d) / rate_d + stall_weight x streams_d x n_d / rate_d
    hop  = (queue_p + n_p) / rate_p + visible + overhead
    visible = max(T / L, T - C (L - 1) / L),   T = n_d x bytes per token / bandwidth,   C = n_p / rate_p

n are the prompt's tokens that a slot has not cached, queue the prompt tokens ahead of them there. What is
computed at the decode slot holds up the streams there, each by its whole time. The layers of the KV are sent
while later ones are computed: `visible` is when the last of L layers is over, after the last token was
computed, in a pipeline of two stages with equal parts (computing takes C in all, sending T). So a short
prompt and one whose beginning is cached at decode stay: there is little to compute, and `overhead` does not
shrink.

A rate that nobody has measured yet is taken from the other side, for the same model runs there; so is a
lower one of a prefill slot, which may have seen short prompts alone. A bandwidth that nobody has measured
is taken to be no hindrance: the first transfer measures it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_PREFIX = "hop_"
_UNIFIED_MS = "unified_ms"


@dataclass(frozen=True, slots=True)
class HopPolicy:
    """`enabled`: prefill slots are used at all while a decode slot lives. `overhead_ms`: what a handoff costs
    besides the transfer. `stall_weight`: what a millisecond that one running stream is held up is worth in
    milliseconds of waiting for the first token. `unmeasured_tokens`: while no rate is known, prompts that
    lack as many hop. `spill`: where one pool has no room, slots of the other may take requests whole.

    A handoff is two records, of 1 to 3 ms each. A stream's token costs its reader a tenth of what a first
    token does: with ten streams and more, what a prompt takes counts twice.
    """

    enabled: bool = True
    overhead_ms: float = 5.0
    stall_weight: float = 0.1
    unmeasured_tokens: int = 256
    spill: bool = True

    def hops(self, seen: "Hop") -> bool:
        """Whether the prompt goes by way of the prefill slot: decided by `seen` alone."""
        if not self.enabled or not seen.decode_takes_whole:
            return self.enabled
        here_ms, hop_ms = here(self, seen), hop(self, seen)
        if here_ms is None or hop_ms is None:
            return seen.uncached_at_decode >= self.unmeasured_tokens
        return hop_ms < here_ms

    def takes_unified(self, seen: "Hop") -> bool:
        """Whether the unified slot costs no more than either way over the decode slot."""
        if seen.unified_ms is None:
            return False
        ways = [hop(self, seen), here(self, seen) if seen.decode_takes_whole else None]
        known = [ms for ms in ways if ms is not None]
        return not known or seen.unified_ms <= min(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A request, the best decode slot and the best prefill slot for it. `decode_takes_whole`: it has room for
    the prompt, too. Rates are in tokens a second, 0 where
    nobody has measured them; `num_layers` 0 where the layout is not known: nothing overlaps then.

    `unified_ms`: what the best unified slot would take (as `here`), None where there is none with room.
    """

    prompt_tokens: int
    decode_cached_tokens: int
    decode_queued_tokens: int
    decode_tokens_per_s: float
    decode_streams: int
    prefill_cached_tokens: int
    prefill_queued_tokens: int
    prefill_tokens_per_s: float
    kv_bytes_per_token: int
    transfer_bytes_per_s: float
    num_layers: int
    decode_takes_whole: bool = True
    unified_ms: float | None = None

    @property
    def uncached_at_decode(self) -> int:
        """Tokens whose KV must be computed or sent."""
        return max(0, self.prompt_tokens - self.decode_cached_tokens)

    @property
    def uncached_at_prefill(self) -> int:
        return max(0, self.prompt_tokens - self.prefill_cached_tokens)

    @property
    def rate_at_prefill(self) -> float:
        """Tokens a second, 0 where neither side has measured it. A slot without long prompts has measured
        short ones, whose steps are mostly overhead: taken at its word, it would never get any."""
        return max(self.prefill_tokens_per_s, self.decode_tokens_per_s)

    def inputs(self) -> dict[str, float]:
        """The figures by name, as a decision's record has them."""
        figures = {_PREFIX + name: float(getattr(self, name)) for name in _KINDS}
        if self.unified_ms is not None:
            figures[_PREFIX + _UNIFIED_MS] = self.unified_ms
        return figures

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, float]) -> "Hop | None":
        """What `inputs` was made from; None for a decision without such a choice."""
        if any(_PREFIX + name not in inputs for name in _KINDS):
            return None
        values: dict[str, Any] = {name: kind(inputs[_PREFIX + name]) for name, kind in _KINDS.items()}
        return cls(**values, unified_ms=inputs.get(_PREFIX + _UNIFIED_MS))


_KINDS = {f.name: float if f.type in (float, "float") else int for f in fields(Hop) if f.name != _UNIFIED_MS}


def here(policy: HopPolicy, seen: Hop) -> float | None:
    """What the request costs with its prompt computed at the decode slot (ms). None: no rate is known."""
    rate = seen.decode_tokens_per_s or seen.prefill_tokens_per_s
    return whole(policy, seen.uncached_at_decode, seen.decode_queued_tokens, rate, seen.decode_streams)


def whole(
    policy: HopPolicy, uncached_tokens: int, queued_tokens: int, tokens_per_s: float, streams: int
) -> float | None:
    """What a request costs at a slot that runs it from its prompt on (ms). None: no rate is known."""
    if tokens_per_s <= 0:
        return None
    own_ms = uncached_tokens * 1_000 / tokens_per_s
    return queued_tokens * 1_000 / tokens_per_s + own_ms * (1 + policy.stall_weight * streams)


def hop(policy: HopPolicy, seen: Hop) -> float | None:
    """What the request costs by way of the prefill slot (ms). None: no rate is known."""
    rate = seen.rate_at_prefill
    if rate <= 0:
        return None
    to_compute = seen.prefill_queued_tokens + seen.uncached_at_prefill
    return to_compute * 1_000 / rate + handoff_ms(policy, seen)


def handoff_ms(policy: HopPolicy, seen: Hop) -> float:
    """What a handoff takes behind the prompt's last token (ms). Where no rate is known nothing overlaps."""
    rate = seen.rate_at_prefill
    compute_ms = seen.uncached_at_prefill * 1_000 / rate if rate > 0 else 0.0
    transfer_ms = 0.0
    if seen.transfer_bytes_per_s > 0:
        transfer_ms = seen.uncached_at_decode * seen.kv_bytes_per_token * 1_000 / seen.transfer_bytes_per_s
    return visible_ms(compute_ms, transfer_ms, seen.num_layers) + policy.overhead_ms


def visible_ms(compute_ms: float, transfer_ms: float, num_layers: int) -> float:
    """How long a transfer goes on after the last token was computed, layer by layer (see above)."""
    layers = max(1, num_layers)
    return max(transfer_ms / layers, transfer_ms - compute_ms * (layers - 1) / layers)
