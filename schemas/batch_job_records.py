"""Records of batches of a file's lines. See records.py."""

from dataclasses import dataclass, field

# batch.jobs


@dataclass(slots=True)
class BatchJob:
    batch_id: str
    tenant: str
    form: str
    input_file_id: str
    endpoint: str | None
    model: str | None
    completion_window_ms: int
    created_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    output_expires_ms: int | None = None
    lines: int | None = None


@dataclass(slots=True)
class BatchCancel:
    batch_id: str
    tenant: str
    asked_at: int


# batch.states


@dataclass(slots=True)
class BatchError:
    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(slots=True)
class BatchPart:
    epoch: int
    size: int


@dataclass(slots=True)
class BatchState:
    batch_id: str
    tenant: str
    status: str
    expires_at: int
    total: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    errors: list[BatchError] = field(default_factory=list)
    output: list[BatchPart] = field(default_factory=list)
    error_output: list[BatchPart] = field(default_factory=list)
    low_index: int = 0
    low_offset: int = 0
    ended: bytes = b""
