"""Refusals: one exception, one table of kinds, OpenAI's shape."""

import json
from dataclasses import dataclass

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled",
    500: "server_error",
    502: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(slots=True)
class ApiError(Exception):
    """A refusal: HTTP status, machine-readable code, text for the user, and the field that is at fault."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error")

    def to_dict(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_json(self) -> bytes:
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":")).encode()

    def retry_after_s(self) -> int | None:
        """The Retry-After header: whole seconds, at least one; None where there is none to give."""
        return None if self.retry_after_ms is None else max(1, -(-self.retry_after_ms // 1000))


def bad_field(param: str, message: str) -> ApiError:
    """400 that names the field."""
    return ApiError(400, "invalid_value", f"{param}: {message}", param)
