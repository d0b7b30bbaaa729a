"""Where the local stack answers, written down by `infra/up` for the commands."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.local.paths import DEFAULT_DATA_DIR

_FILE = "endpoints.json"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """`kafka` is host:port; the others are URLs. The counts are those of the topics' layout."""

    kafka: str
    gateway: str
    sql: str
    shards: int
    worker_slots: int
    gateway_slots: int
    broker_auth: bool = False

    def save(self, data_dir: Path) -> None:
        unfinished = data_dir / f"{_FILE}.partial"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.rename(data_dir / _FILE)

    @staticmethod
    def forget(data_dir: Path) -> None:
        (data_dir / _FILE).unlink(missing_ok=True)

    @classmethod
    def load(cls, data_dir: Path = DEFAULT_DATA_DIR) -> "Endpoints | None":
        """None when no local stack is up (or one was killed before it could say)."""
        try:
            return cls(**json.loads((data_dir / _FILE).read_text()))
        except FileNotFoundError:
            return None
