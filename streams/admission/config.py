"""Admission's settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from schemas.catalog import Catalog, CatalogError
from schemas.config import CommonConfig, setting
from streams.admission.admission import Admission
from streams.admission.arrival import OverloadPolicy
from streams.admission.decisions import DecisionLog
from streams.admission.fallback import DEFAULT_WAIT_MS, FallbackPolicy
from streams.admission.hop import HopPolicy
from streams.admission.prediction import DEFAULT_QUANTILE, OutputPredictor
from streams.admission.router import DEFAULT_MAX_AFFINITY, RoutingPolicy
from streams.admission.shedding import ShedPolicy
from streams.admission.waiting import HandoffPolicy, WaitingPolicy

ROLE = "admission"


def _rising(text: str, count: int) -> list[float] | None:
    """The numbers in `text`; None unless they are so many, above 0, and rise."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        return None
    rises = all(low < high for low, high in zip([0.0, *numbers], numbers, strict=False))
    return numbers if len(numbers) == count and rises else None


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig(CommonConfig):
    max_queued_requests: int = setting(10_000, doc="Requests that may wait, per model and class.")
    max_queued_tokens: int = setting(20_000_000, doc="Tokens that may wait, per model and class.")
    no_worker_wait_ms: int = setting(10_000, doc="How long a request waits for a worker of its model (ms).")
    prefix_affinity: bool = setting(True, doc="Whether requests go where their beginning is cached.")
    max_affinity: float = setting(
        DEFAULT_MAX_AFFINITY, doc="How much load a cached beginning may outweigh (1: a whole batch)."
    )
    handoffs: bool = setting(
        True, doc="Whether prompts are computed at prefill workers and their KV sent to decode workers."
    )
    handoff_overhead_ms: float = setting(
        HopPolicy().overhead_ms, doc="What a handoff is taken to cost besides the transfer (ms)."
    )
    handoff_stall_weight: float = setting(
        HopPolicy().stall_weight,
        doc="What holding up a stream for 1 ms is worth in waiting for a prompt (ms).",
    )
    handoff_spill: bool = setting(
        True, doc="Whether workers of one role take whole requests while the other role has no room."
    )
    handoff_reserve_ms: int = setting(
        HandoffPolicy().reserve_ms, doc="How long a prefill worker waits for blocks at decode (ms)."
    )
    handoff_lease_ms: int = setting(
        HandoffPolicy().lease_ms, doc="When a handoff has ended in one way or another (ms)."
    )
    fallback_wait_ms: int = setting(
        DEFAULT_WAIT_MS, doc="A longer expected wait sends a request to one of its fallback models (ms)."
    )
    start_ms_interactive: int = setting(
        60_000, doc="How long an interactive request may wait that does not say (ms); 0 is for ever."
    )
    start_ms_free: int = setting(120_000, doc="The same for class free (ms).")
    start_ms_batch: int = setting(0, doc="The same for batch (ms).")
    shed_wait_ms: str = setting(
        ",".join(map(str, ShedPolicy().rise_wait_ms)),
        doc="Waits of online requests that bring each shedding level, in order (ms, four, by commas).",
    )
    shed_kv_use: str = setting(
        ",".join(map(str, ShedPolicy().rise_kv_use)),
        doc="KV use (0 to 1) that pauses batch, and that caps class free where something waits.",
    )
    shed_hold_ms: int = setting(
        ShedPolicy().hold_ms, doc="How long it must be calm before a shedding level ends (ms)."
    )
    shed_free_max_tokens: int = setting(
        ShedPolicy().free_max_tokens, doc="max_tokens of class free while it is capped."
    )
    output_quantile: float = setting(
        DEFAULT_QUANTILE, doc="Which quantile of a tenant's answers an answer is expected to have (0 to 1)."
    )
    decision_log: bool = setting(True, doc="Whether decisions go to fleet.decisions.")
    restate_wait_ms: int = setting(
        500, doc="Milliseconds that owners have to say what they run on a partition taken over."
    )
    session_timeout_ms: int = setting(
        6_000,
        doc="The consumer group's session timeout (ms): a dead process that no other puts out is out then.",
    )
    ack_deadline_s: float = setting(
        60.0, doc="A send not acked for so long, while the broker takes heartbeats, ends the process (s)."
    )
    stop_timeout_s: float = setting(10.0, doc="For finishing what is decided, at a stop (s).")

    def errors(self) -> list[str]:
        found = super().errors()
        for name in (
            "max_queued_requests",
            "max_queued_tokens",
            "no_worker_wait_ms",
            "session_timeout_ms",
            "restate_wait_ms",
            "handoff_reserve_ms",
            "handoff_lease_ms",
        ):
            if getattr(self, name) < 1:
                found.append(f"HEADRACE_{name.upper()} must be at least 1, not {getattr(self, name)}")
        for name in (
            "start_ms_interactive",
            "start_ms_free",
            "start_ms_batch",
            "shed_hold_ms",
            "fallback_wait_ms",
            "handoff_overhead_ms",
            "handoff_stall_weight",
        ):
            if not getattr(self, name) >= 0:
                found.append(f"HEADRACE_{name.upper()} must be at least 0, not {getattr(self, name)}")
        if self.shed_free_max_tokens < 1:
            found.append(f"HEADRACE_SHED_FREE_MAX_TOKENS must be at least 1, not {self.shed_free_max_tokens}")
        for name, count in (("shed_wait_ms", 4), ("shed_kv_use", 2)):
            bounds = _rising(getattr(self, name), count)
            if bounds is None or (name == "shed_kv_use" and bounds[-1] > 1):
                found.append(
                    f"HEADRACE_{name.upper()} must be {count} rising numbers above 0 (of KV use up to 1), "
                    f"separated by commas, not {getattr(self, name)!r}"
                )
        for name in ("ack_deadline_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                found.append(f"HEADRACE_{name.upper()} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.output_quantile <= 1:
            found.append(f"HEADRACE_OUTPUT_QUANTILE must be 0 to 1, not {self.output_quantile}")
        try:
            self.fallback_models()
        except CatalogError as error:
            found.append(str(error))
        if not self.max_affinity >= 0:
            found.append(f"HEADRACE_MAX_AFFINITY must be at least 0, not {self.max_affinity}")
        return found

    def policy(self) -> WaitingPolicy:
        return WaitingPolicy(
            self.max_queued_requests,
            self.max_queued_tokens,
            self.no_worker_wait_ms,
            self.overload_policy(),
            HandoffPolicy(self.handoff_reserve_ms, self.handoff_lease_ms),
        )

    def overload_policy(self) -> OverloadPolicy:
        waits, uses = _rising(self.shed_wait_ms, 4), _rising(self.shed_kv_use, 2)
        assert waits is not None  # `errors` looked at both
        assert uses is not None
        shed = ShedPolicy(
            rise_wait_ms=(int(waits[0]), int(waits[1]), int(waits[2]), int(waits[3])),
            rise_kv_use=(uses[0], uses[1]),
            hold_ms=self.shed_hold_ms,
            free_max_tokens=self.shed_free_max_tokens,
        )
        return OverloadPolicy((self.start_ms_interactive, self.start_ms_free, self.start_ms_batch), shed)

    def predictor(self) -> OutputPredictor:
        return OutputPredictor(self.output_quantile)

    def routing(self) -> RoutingPolicy:
        hop = HopPolicy(
            enabled=self.handoffs,
            overhead_ms=self.handoff_overhead_ms,
            stall_weight=self.handoff_stall_weight,
            spill=self.handoff_spill,
        )
        return RoutingPolicy(self.prefix_affinity, self.max_affinity, hop)

    def admission(
        self,
        fallback_models: Mapping[str, Sequence[str]] | None = None,
        overload: OverloadPolicy | None = None,
        routing: RoutingPolicy | None = None,
    ) -> Admission:
        """The decisions with these settings: what the service runs, and the simulator. `overload` and
        `routing` are in the place of those that the settings make."""
        policy = self.policy()
        return Admission(
            policy if overload is None else replace(policy, overload=overload),
            DecisionLog(self.decision_log),
            self.predictor(),
            routing or self.routing(),
            self.slot,
            FallbackPolicy(fallback_models or {}, self.fallback_wait_ms),
        )

    def fallback_models(self) -> dict[str, list[str]]:
        """What the catalogue says, by model. Raises CatalogError."""
        return Catalog.load(self.models_dir).fallback_models()
