"""What a policy is to `headrace replay`, the shipped one, and how another is loaded.

A policy is a Python file with a function `make_policy()` that returns an object with the methods of `Policy`.
Most change one thing of the shipped one:

    from infra.replay.policy import ShippedPolicy
    from streams.admission.arrival import OverloadPolicy

    def make_policy():
        return ShippedPolicy(OverloadPolicy(start_ms=(2_000, 10_000, 0)))
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from streams.admission.arrival import Arrival, OverloadPolicy, capped, refusal
from streams.admission.hop import Hop
from streams.admission.refusal import Refusal
from streams.admission.router import NEAR, RoutingPolicy, score


class PolicyError(ValueError):
    """The file is no policy."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that had room: its load without the request, what it was expected to have cached of the
    prompt, its slowness beside the fastest (1 and more), the time its prefill was expected to take with the
    request (ms, None: not known). `chosen`: it was the one.
    """

    slot: int
    load: float
    cached_tokens: int
    slowness: float
    prefill_ms: float | None
    chosen: bool


@runtime_checkable
class Policy(Protocol):
    """Requests come in the order in which they came to admission; a policy may keep what it has seen."""

    def admit(self, tenant: str, model: str, seen: Arrival) -> Refusal | None:
        """Why the load does not let the request in. Limits and budgets are not asked: what they
        refused stays refused."""

    def max_tokens(self, tenant: str, model: str, seen: Arrival) -> int:
        """How long its answer may be: `seen.max_tokens`, or less."""

    def predict_ttft_ms(self, tenant: str, model: str, seen: Arrival) -> float:
        """From its arrival to its first token."""

    def route(self, seen: Arrival, candidates: Sequence[Candidate]) -> int:
        """The slot of one of the candidates (one at least; the least loaded are recorded)."""


@runtime_checkable
class HopChooser(Protocol):
    """What a policy may have, too."""

    def hops(self, seen: Hop) -> bool:
        """Whether a request's prompt is computed at the prefill slot, and not where it is decoded or at a
        unified slot."""


class ShippedPolicy:
    """What admission runs. Over its own record, with its own settings, it decides the same."""

    def __init__(self, overload: OverloadPolicy | None = None, routing: RoutingPolicy | None = None) -> None:
        self.overload = overload or OverloadPolicy()
        self.routing = routing or RoutingPolicy()

    def admit(self, tenant: str, model: str, seen: Arrival) -> Refusal | None:
        return refusal(self.overload, seen)

    def max_tokens(self, tenant: str, model: str, seen: Arrival) -> int:
        return capped(self.overload.shed, seen) or seen.max_tokens

    def predict_ttft_ms(self, tenant: str, model: str, seen: Arrival) -> float:
        return seen.predicted_ttft_ms

    def route(self, seen: Arrival, candidates: Sequence[Candidate]) -> int:
        scores = [
            (score(self.routing, c.load, seen.prompt_tokens, c.cached_tokens, c.slowness), c)
            for c in candidates
        ]
        best = min(scores, key=lambda entry: entry[0])
        # Among equals the hint of the request decides, which is not recorded: what it chose stays.
        near = [c for value, c in scores if c.chosen and value <= best[0] + NEAR]
        return near[0].slot if near else best[1].slot

    def hops(self, seen: Hop) -> bool:
        return self.routing.hop.hops(seen) and not self.routing.hop.takes_unified(seen)


def load_policy(path: Path) -> Policy:
    """The policy of the file. Raises PolicyError that says what is wrong with it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise PolicyError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PolicyError(f"{path}: {type(error).__name__}: {error}") from error
    make: Callable[[], object] | None = getattr(module, "make_policy", None)
    if make is None:
        raise PolicyError(f"{path} has no function make_policy()")
    policy = make()
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"{path}: make_policy() gave a {type(policy).__name__} without all of Policy's methods"
        )
    return policy
