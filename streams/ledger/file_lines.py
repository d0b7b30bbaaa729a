"""Lines of a job's output and error files: OpenAI's format. Pure.

    {"id", "custom_id", "response": null | {"status_code", "request_id", "body"},
     "error": null | {"code", "message"}}

What the API would have refused is a response with its status; what failed, expired or was cancelled on
the way is an error.
"""

import hashlib
from typing import Any

import msgspec

from schemas.api.errors import ApiError

# Ours, as nginx has it: who asked wants no answer any more.
CANCELLED_STATUS = 499


def item_request_id(batch_id: str, index: int) -> bytes:
    """16 bytes, the same in every life of a coordinator."""
    return hashlib.blake2b(f"{batch_id}/{index}".encode(), digest_size=16).digest()


def answer_line(custom_id: str, request_id: bytes, body: dict[str, Any]) -> bytes:
    """`body` is what the API of the line answers with."""
    return _line(custom_id, request_id, _response(200, request_id, body), None)


def error_line(custom_id: str, request_id: bytes, error: ApiError) -> bytes:
    if error.status < CANCELLED_STATUS:
        return _line(custom_id, request_id, _response(error.status, request_id, error.to_dict()), None)
    return _line(custom_id, request_id, None, {"code": error.code, "message": error.message})


def _response(status: int, request_id: bytes, body: object) -> dict[str, object]:
    return {"status_code": status, "request_id": request_id.hex(), "body": body}


def _line(custom_id: str, request_id: bytes, response: object, error: object) -> bytes:
    line = {
        "id": f"batch_req_{request_id.hex()}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"
