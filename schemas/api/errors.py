"""Refusals: one exception, one table of kinds, the shapes of OpenAI and of Anthropic."""

import json
from dataclasses import dataclass

# Status: OpenAI's type, Anthropic's type.
TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    409: ("invalid_request_error", "invalid_request_error"),
    410: ("not_found_error", "not_found_error"),
    412: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    422: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    431: ("invalid_request_error", "request_too_large"),
    499: ("cancelled", "api_error"),
    500: ("server_error", "api_error"),
    502: ("server_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}
_MAX_MESSAGE, _MAX_PARAM = 2_000, 200
_OTHER = ("server_error", "api_error")


@dataclass(slots=True)
class ApiError(Exception):
    """A refusal: HTTP status, machine-readable code, text for the user, and the field that is at fault."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None

    def __post_init__(self) -> None:
        # It may quote what was sent, which may be megabytes.
        self.message = _cut(self.message, _MAX_MESSAGE)
        if self.param is not None:
            self.param = _cut(self.param, _MAX_PARAM)

    @property
    def type(self) -> str:
        """OpenAI's."""
        return TYPES.get(self.status, _OTHER)[0]

    @property
    def anthropic_type(self) -> str:
        return TYPES.get(self.status, _OTHER)[1]

    def to_dict(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_anthropic(self, request_id: bytes) -> dict[str, object]:
        """Anthropic's error object."""
        error = {"type": self.anthropic_type, "message": self.message}
        return {"type": "error", "error": error, "request_id": request_id.hex()}

    def to_json(self, anthropic_id: bytes | None = None) -> bytes:
        """OpenAI's object, or with the id of the request Anthropic's."""
        shape = self.to_dict() if anthropic_id is None else self.to_anthropic(anthropic_id)
        return json.dumps(shape, ensure_ascii=False, separators=(",", ":")).encode()

    def retry_after_s(self) -> int | None:
        """The Retry-After header: whole seconds, at least one; None where there is none to give."""
        return None if self.retry_after_ms is None else max(1, -(-self.retry_after_ms // 1000))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def bad_field(param: str, message: str) -> ApiError:
    """400 that names the field."""
    return ApiError(400, "invalid_value", f"{param}: {message}", param)
