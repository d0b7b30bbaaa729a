"""Admission's settings."""

from dataclasses import dataclass

from schemas.config import CommonConfig, setting
from streams.admission.admission import Admission
from streams.admission.decisions import DecisionLog
from streams.admission.prediction import DEFAULT_QUANTILE, OutputPredictor
from streams.admission.router import DEFAULT_MAX_AFFINITY, RoutingPolicy
from streams.admission.waiting import WaitingPolicy

ROLE = "admission"


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig(CommonConfig):
    max_queued_requests: int = setting(10_000, doc="Requests that may wait, per model and class.")
    max_queued_tokens: int = setting(20_000_000, doc="Tokens that may wait, per model and class.")
    no_worker_wait_ms: int = setting(10_000, doc="How long a request waits for a worker of its model (ms).")
    prefix_affinity: bool = setting(True, doc="Whether requests go where their beginning is cached.")
    max_affinity: float = setting(
        DEFAULT_MAX_AFFINITY, doc="How much load a cached beginning may outweigh (0.5: half a batch)."
    )
    output_quantile: float = setting(
        DEFAULT_QUANTILE, doc="Which quantile of a tenant's answers an answer is expected to have (0 to 1)."
    )
    decision_log: bool = setting(True, doc="Whether decisions go to fleet.decisions.")
    session_timeout_ms: int = setting(6_000, doc="The consumer group's session timeout (ms).")
    ack_deadline_s: float = setting(60.0, doc="A send that is not acked for so long ends the process (s).")
    stop_timeout_s: float = setting(10.0, doc="For finishing what is decided, at a stop (s).")

    def errors(self) -> list[str]:
        found = super().errors()
        for name in ("max_queued_requests", "max_queued_tokens", "no_worker_wait_ms", "session_timeout_ms"):
            if getattr(self, name) < 1:
                found.append(f"HEADRACE_{name.upper()} must be at least 1, not {getattr(self, name)}")
        for name in ("ack_deadline_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                found.append(f"HEADRACE_{name.upper()} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.output_quantile <= 1:
            found.append(f"HEADRACE_OUTPUT_QUANTILE must be 0 to 1, not {self.output_quantile}")
        if not self.max_affinity >= 0:
            found.append(f"HEADRACE_MAX_AFFINITY must be at least 0, not {self.max_affinity}")
        return found

    def policy(self) -> WaitingPolicy:
        return WaitingPolicy(self.max_queued_requests, self.max_queued_tokens, self.no_worker_wait_ms)

    def predictor(self) -> OutputPredictor:
        return OutputPredictor(self.output_quantile)

    def routing(self) -> RoutingPolicy:
        return RoutingPolicy(self.prefix_affinity, self.max_affinity)

    def admission(self) -> Admission:
        """The decisions with these settings: what the service runs, and the simulator."""
        decisions = DecisionLog(self.decision_log)
        return Admission(self.policy(), decisions, self.predictor(), self.routing(), self.slot)
