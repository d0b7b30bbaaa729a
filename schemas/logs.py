"""Structured logs: one JSON object a line on stderr, with request_id wherever a request is meant.

Use `log.info("what happened", extra={"request_id": rid.hex(), ...})`; extras become fields.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Collection
from typing import Any

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_MAX_KINDS = 1_000


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


class OncePerSecond(logging.Filter):
    """Of what these libraries say, the same thing once a second; `repeats` tells how often it was left out.

    Thirty clients that look for a broker ten times a second write a thousand lines a second else, which costs
    the broker the time that it needs to come back.
    """

    def __init__(self, libraries: Collection[str]) -> None:
        super().__init__()
        self._libraries = frozenset(libraries)
        self._said: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] not in self._libraries:
            return True
        key = (record.name, str(record.msg))
        at, repeats = self._said.get(key, (-math.inf, 0))
        if record.created - at < 1:
            self._said[key] = (at, repeats + 1)
            return False
        if len(self._said) >= _MAX_KINDS:
            self._said.clear()
        self._said[key] = (record.created, 0)
        if repeats:
            record.repeats = repeats
        return True


def configure(service: str, slot: int, level: str = "INFO") -> None:
    """Sends all logging of this process to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service, slot))
    handler.addFilter(OncePerSecond(("aiokafka", "kafka")))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # These say at INFO what happens on every fetch or request.
    for noisy in ("aiokafka", "kafka", "httpx", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
