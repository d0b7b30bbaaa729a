"""Structured logs: one JSON object a line on stderr, with request_id wherever a request is meant.

Use `log.info("what happened", extra={"request_id": rid.hex(), ...})`; extras become fields.
"""

import json
import logging
import sys
import time
from typing import Any

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str, slot: int) -> None:
        super().__init__()
        self._fixed = {"service": service, "slot": slot}

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            **self._fixed,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in record.__dict__.items():
            if key not in _STANDARD:
                line[key] = value.hex() if isinstance(value, bytes) else value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure(service: str, slot: int, level: str = "INFO") -> None:
    """Sends all logging of this process to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service, slot))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # These say at INFO what happens on every fetch or request.
    for noisy in ("aiokafka", "kafka", "httpx", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
