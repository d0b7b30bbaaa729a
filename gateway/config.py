"""Settings of a gateway."""

from dataclasses import dataclass, field, replace

from schemas.config import CommonConfig, setting
from schemas.object_store import store_errors
from schemas.stored_files import MAX_FILE_BYTES, MAX_FILE_LINES
from schemas.topics import Layout

_MIN_ADMIN_KEY = 32
_POSITIVE = (
    "replication",
    "min_isr",
    "store_timeout_s",
    "max_file_bytes",
    "max_file_lines",
    "max_body_bytes",
    "max_bodies_bytes",
    "max_header_bytes",
    "max_headers",
    "header_timeout_s",
    "max_connections",
    "max_streams",
    "max_streams_per_key",
    "body_timeout_s",
    "ack_timeout_s",
    "start_timeout_s",
    "end_ms",
    "start_wait_s",
    "keep_alive_s",
    "write_timeout_s",
    "cancel_timeout_ms",
    "drain_s",
    "inline_body_bytes",
    "max_detach_s",
    "max_scans",
    "kept_bytes",
    "succession_s",
)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(CommonConfig):
    """What a gateway is told."""

    object_store: str = setting(
        ".headrace/objects",
        doc="Where files are: a folder, or s3://bucket/prefix with the provider's variables.",
    )
    store_timeout_s: float = setting(15.0, doc="Seconds to wait for the object store; then 503.")
    max_file_bytes: int = setting(MAX_FILE_BYTES, doc="Largest file that is uploaded; above it: 413.")
    max_file_lines: int = setting(MAX_FILE_LINES, doc="Most lines of a file for a batch; above it: 400.")
    max_body_bytes: int = setting(8 << 20, doc="Largest request body; above it: 413.")
    body_timeout_s: float = setting(30.0, doc="Seconds a client may take to send its body; then 408.")
    max_bodies_bytes: int = setting(1 << 30, doc="Bytes of all bodies being read; above it: 503.")
    max_header_bytes: int = setting(65_536, doc="Largest URL with all headers; above it: 431.")
    max_headers: int = setting(128, doc="Most header lines of a request; above it: 431.")
    header_timeout_s: float = setting(
        10.0, doc="Seconds for the headers, from the connect or the last answer."
    )
    max_connections: int = setting(10_000, doc="Open connections; those above it get 503.")
    max_streams: int = setting(8_192, doc="Requests answered at a time, streams among them; above it: 503.")
    max_streams_per_key: int = setting(1_024, doc="Of these, those with one key; above it: 503.")
    ack_timeout_s: float = setting(5.0, doc="Seconds to wait for Kafka to take a request; then 503.")
    start_timeout_s: float = setting(60.0, doc="Seconds to wait for Kafka at the start; then it exits.")
    end_ms: int = setting(600_000, doc="Milliseconds from acceptance after which a request is ended.")
    start_wait_s: float = setting(
        10.0, doc="Seconds of queueing after which a stream's response starts anyway."
    )
    keep_alive_s: float = setting(10.0, doc="Seconds without an event after which a comment is sent.")
    write_timeout_s: float = setting(30.0, doc="Seconds a client may leave what it was sent unread.")
    cancel_timeout_ms: int = setting(30_000, doc="Milliseconds to wait for the end of a cancelled request.")
    drain_s: float = setting(30.0, doc="Seconds that running streams have to finish on SIGTERM.")
    inline_body_bytes: int = setting(2_000, doc="Bodies up to this size are tokenized in the event loop.")

    max_detach_s: float = setting(600.0, doc="Most seconds of X-Headrace-Detach.")
    keyed_detach_s: float = setting(
        30.0,
        doc="Seconds a request with an Idempotency-Key goes on unread: time for its client to ask again.",
    )
    max_scans: int = setting(8, doc="Readings of the log at a time, for streams that clients come back to.")
    kept_bytes: int = setting(
        64 << 20, doc="Bytes of streams read back from the log, kept for the next client that reads them."
    )
    succession_s: float = setting(
        25.0,
        doc="Seconds a lost gateway's slot may be empty before another one takes its requests over, and that"
        " clients have to come back to requests that were taken over sooner.",
    )
    replication: int = setting(1, doc="Brokers that hold the topics of a tenant made by this gateway.")
    min_isr: int = setting(1, doc="Of these, those that must have a record before it is acked.")
    admin_key: str = field(
        default="",
        repr=False,
        metadata={"doc": "Key of the administrators' API under /admin/v1; empty: there is none."},
    )
    # A field of its own: what prints a config does not print it.
    stream_secret: str = field(
        default="",
        repr=False,
        metadata={
            "doc": "Signs ids of streams, the same at all gateways; empty: ids are good at this one alone."
        },
    )

    def tenant_layout(self) -> Layout:
        """For the topics of a tenant."""
        return replace(self.layout(), replication=self.replication, min_isr=self.min_isr)

    def errors(self) -> list[str]:
        found = [*super().errors(), *store_errors(self.object_store)]
        if self.admin_key and len(self.admin_key) < _MIN_ADMIN_KEY:
            found.append(f"HEADRACE_ADMIN_KEY must have at least {_MIN_ADMIN_KEY} characters")
        if self.min_isr > self.replication:
            found.append(f"HEADRACE_MIN_ISR is {self.min_isr}, above HEADRACE_REPLICATION")
        found += [
            f"HEADRACE_{name.upper()} must be above 0, not {getattr(self, name)}"
            for name in _POSITIVE
            if getattr(self, name) <= 0
        ]
        if self.slot >= self.gateway_slots:
            found.append(
                f"HEADRACE_SLOT is {self.slot}, but there are {self.gateway_slots} gateway slots, from 0 on"
            )
        return found
