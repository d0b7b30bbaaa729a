"""A batch shard over its log, with a scripted admission and worker: no broker, no clock."""

import json
from pathlib import Path
from typing import Any

from schemas.catalog import Catalog
from schemas.fleet import FleetView
from schemas.models import load_models
from schemas.records import (
    Cancellation,
    Completion,
    Dispatched,
    Heartbeat,
    InferenceRequest,
    Join,
    Rejected,
    Restate,
    Tokens,
    Usage,
)
from schemas.token_records import TokenChunk
from streams.ledger.batch import BatchShard
from streams.ledger.batch_actions import (
    Action,
    AdmissionOffsets,
    Append,
    CancelRun,
    Restated,
    Seal,
    SendRequest,
)
from streams.ledger.batch_item import BatchItem
from streams.ledger.batch_records import parse

MODELS = load_models(Catalog.load(Path("none")), ["simulated"])
P = 2  # the reply partition, and the requests partition, of shard 0
EPOCH, WORKER = 50, 20
END_MS = 86_400_000


def make_item(name: str = "a", offset: int = 0, max_tokens: int = 4, accepted_at: int = 0) -> BatchItem:
    body = {"custom_id": name, "model": "simulated", "prompt": "hi", "max_tokens": max_tokens}
    item = parse(json.dumps(body).encode(), "demo", offset, accepted_at, MODELS)
    assert isinstance(item, BatchItem)
    return item


class World:
    """One shard over its log. `log` is the reply partition; `requests` what went to inference.requests."""

    def __init__(self, log: list[Any] | None = None, resume: int = 0, epoch: int = EPOCH) -> None:
        self.log = [] if log is None else log
        self.epoch = epoch
        self.now = 0
        self.fleet = FleetView()
        self.fleet.watch_as("ledger", 0, epoch)
        self.fleet.on_event(Join("worker", 0, b"n"), WORKER)
        self.beat(0)
        self.requests: list[InferenceRequest] = []
        self.cancelled: list[Cancellation] = []
        self.restated: list[Restate] = []
        self.seals: list[Usage] = []
        self.admission: dict[int, AdmissionOffsets] = {}
        self.shard = BatchShard(0, 0, epoch, end_ms=END_MS, position=resume, now_ms=self.now)
        self._read = resume
        self.read_back()

    def beat(self, passed_ms: int) -> None:
        self._stamp = getattr(self, "_stamp", 1_000_000)
        for step in range(0, passed_ms + 1, 100):
            for role, epoch in (("ledger", self.epoch), ("worker", WORKER)):
                self.fleet.on_heartbeat(Heartbeat(role, 0, epoch, b"n"), self._stamp + step)
        self._stamp += passed_ms
        self.now += passed_ms

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendRequest(request):
                    self.requests.append(request)
                    self.shard.on_sent(request.request_id, request.attempt, len(self.requests) - 1)
                case Append(record):
                    self.log.append(record)
                case CancelRun(record):
                    self.cancelled.append(record)
                case Restated(record):
                    self.restated.append(record)
                case Seal(usage):
                    self.seals.append(usage)

    def accept(self, item: BatchItem) -> None:
        self.do(self.shard.accept(item, self.now, self.fleet.clock.now_ms))
        self.read_back()

    def say(self, *records: Any) -> None:
        self.log += records
        self.read_back()

    def read_back(self) -> None:
        while self._read < len(self.log):
            record = self.log[self._read]
            self._read += 1
            self.do(self.shard.on_reply(record, self._read - 1, 0, self.now, self.fleet.clock.now_ms))

    def tick(self, passed_ms: int = 0) -> None:
        self.beat(passed_ms)
        self.do(self.shard.tick(self.now, self.fleet, self.admission))
        self.read_back()

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(answer.value) for answer in self.shard.answers.topic]

    @property
    def last(self) -> InferenceRequest:
        return self.requests[-1]


def dispatched(request: InferenceRequest, epoch: int = WORKER) -> Dispatched:
    return Dispatched(request.request_id, request.attempt, request.owner_epoch, 0, epoch, "simulated")


def tokens(request: InferenceRequest, position: int, text: str, epoch: int = WORKER) -> Tokens:
    chunk = TokenChunk(request.request_id, request.attempt, position, list(text.encode()))
    return Tokens.of(0, epoch, [chunk])


def completion(
    request: InferenceRequest, count: int, reason: str = "length", epoch: int = WORKER
) -> Completion:
    return Completion(request.request_id, request.attempt, 0, epoch, 3, 0, count, reason)


def rejected(request: InferenceRequest, status: int, code: str = "no", after: int | None = None) -> Rejected:
    return Rejected(request.request_id, request.attempt, status, code, code, after)
