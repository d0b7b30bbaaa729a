"""From a raw record of inference.requests to decisions. What cannot be served is kept and refused."""

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from schemas.codec import CodecError
from schemas.dead_letters import dead_letter
from schemas.headers import Headers, reply_to, traceparent
from schemas.records import Cancellation, InferenceRequest, Restate
from schemas.stream_state import LATE_ADMITTED_MS
from streams.admission.actions import Action, DeadLetter, place_of, reject
from streams.admission.admission import Admission
from streams.admission.metrics import Metrics
from streams.admission.refusal import Refusal
from streams.consumer import decode_or_catch_up

log = logging.getLogger(__name__)


class Intake:
    """`catch_up_schemas` reads control.schemas to its end: asked when a writer's schema is not known yet.

    `catch_up_tenants` the same for control.tenants and a tenant: it may have been made a moment ago.
    """

    def __init__(
        self,
        admission: Admission,
        metrics: Metrics,
        clock: Callable[[], int],
        catch_up_schemas: Callable[[], Awaitable[None]],
        catch_up_tenants: Callable[[], Awaitable[None]],
    ) -> None:
        self._admission = admission
        self._metrics = metrics
        self._clock = clock
        self._catch_up_schemas = catch_up_schemas
        self._catch_up_tenants = catch_up_tenants
        self._parked: dict[int, list[tuple[InferenceRequest | Cancellation, bytes, int, str | None]]] = {}

    def look_again(self, partition: int) -> list[Action]:
        """Something that the partition's requests waited for is known now: what to do about those."""
        actions: list[Action] = []
        for entry in self._parked.pop(partition, ()):
            record, raw, offset, trace = entry
            if self._must_wait(record, partition):
                self._parked.setdefault(partition, []).append(entry)
            else:
                actions += self._serve(record, raw, partition, offset, trace)
        return actions

    def assigned(self, partitions: Collection[int]) -> None:
        """What waits from other partitions is for their new holder, to whom the owners send it again."""
        self._parked = {number: some for number, some in self._parked.items() if number in partitions}

    async def on_record(
        self,
        partition: int,
        offset: int,
        key: bytes | None,
        value: bytes | None,
        raw_headers: Iterable[tuple[str, bytes | None]] | None,
    ) -> list[Action]:
        """What to do about one record. Never raises: an error here would lose the record."""
        began = time.perf_counter()
        if not self._admission.takeover.accept(partition, offset):
            self._metrics.read_skipped.inc()
            if self._admission.takeover.skips(partition, offset):
                return await self._skip(partition, offset, value or b"", raw_headers)
            return []
        headers = _pairs(raw_headers)
        try:
            record = await decode_or_catch_up(value or b"", self._catch_up_schemas)
            if isinstance(record, InferenceRequest) and record.tenant not in self._admission.tenants:
                await self._catch_up_tenants()
            actions = self._decide(record, value or b"", partition, offset, headers)
        except Exception as error:
            if not isinstance(error, CodecError):
                log.exception("record %d/%d could not be served", partition, offset)
            actions = self._give_up(partition, offset, key, value or b"", headers, error)
        self._metrics.decision_seconds.observe(time.perf_counter() - began)
        return actions

    async def _skip(
        self,
        partition: int,
        offset: int,
        value: bytes,
        raw_headers: Iterable[tuple[str, bytes | None]] | None,
    ) -> list[Action]:
        """What was for an earlier holder to serve, which maybe did not.

        Of a request that may have no answer it is said where it lies: its owner sends it again, or who comes
        after its owner finds and ends it. Where there was an answer, that does not count.
        """
        try:
            record = await decode_or_catch_up(value, self._catch_up_schemas)
        except Exception:
            return []  # who was to serve it has refused it, or its owner sends it again
        if isinstance(record, Cancellation) and record.key is not None:
            # The key may be free by nothing but this.
            return self._decide(record, value, partition, offset, _pairs(raw_headers))
        if not isinstance(record, InferenceRequest) or record.attempt > 1:
            return []  # of a later attempt its reply partition tells
        if self._clock() - record.accepted_at >= LATE_ADMITTED_MS:
            return []
        return [place_of(record, partition, offset, traceparent(_pairs(raw_headers)))]

    def _decide(self, record: Any, raw: bytes, partition: int, offset: int, headers: Headers) -> list[Action]:
        match record:
            case InferenceRequest():
                self._metrics.read_requests.inc()
            case Cancellation():
                self._metrics.read_cancellations.inc()
            case Restate():
                self._admission.restating.on_restate(record, partition, self._clock())
                return []
            case _:
                raise CodecError(f"{type(record).__name__} does not belong on inference.requests")
        trace = traceparent(headers)
        if self._must_wait(record, partition):
            self._parked.setdefault(partition, []).append((record, raw, offset, trace))
            if isinstance(record, InferenceRequest) and record.attempt == 1:
                # Should its owner and this process die now, this alone tells of it.
                return [place_of(record, partition, offset, trace)]
            return []
        return self._serve(record, raw, partition, offset, trace)

    def _must_wait(self, record: InferenceRequest | Cancellation, partition: int) -> bool:
        """What earlier holders of the partition knew has to be known first."""
        if isinstance(record, Cancellation):
            # It may mean one that waits here.
            if partition in self._parked:
                return True
            has_key, begins = record.key is not None, False
        else:
            has_key, begins = record.idempotency is not None, record.attempt == 1
        if has_key and not self._admission.keys.is_loaded(partition):
            return True
        return begins and not self._admission.restating.is_open(partition)

    def _serve(
        self,
        record: InferenceRequest | Cancellation,
        raw: bytes,
        partition: int,
        offset: int,
        trace: str | None,
    ) -> list[Action]:
        now = self._clock()
        if isinstance(record, Cancellation):
            return self._admission.on_cancel(record, partition, now)
        return self._admission.on_request(record, raw, partition, offset, trace, now)

    def _give_up(
        self,
        partition: int,
        offset: int,
        key: bytes | None,
        value: bytes,
        headers: Headers,
        error: Exception,
    ) -> list[Action]:
        self._metrics.read_bad.inc()
        bad = isinstance(error, CodecError)
        reason = str(error) if bad else f"internal error: {type(error).__name__}"
        to = reply_to(headers)
        log.warning(
            "record %d/%d goes to the dead letters: %s",
            partition,
            offset,
            reason,
            extra={"request_id": to.request_id if to else None},
        )
        actions: list[Action] = [DeadLetter(partition, *dead_letter(key, value, headers, reason))]
        if to is not None:
            refusal = (
                Refusal(400, "undecodable_record", reason) if bad else Refusal(500, "internal_error", reason)
            )
            actions.append(reject(to, refusal))
        return actions


def _pairs(headers: Iterable[tuple[str, bytes | None]] | None) -> Headers:
    return [(name, content or b"") for name, content in headers or ()]
