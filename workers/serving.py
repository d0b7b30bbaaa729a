"""Between mailbox, engine and outbox: what happens to a request in one run. All in the event loop."""

import logging
import time
from collections.abc import Callable

from aiokafka import ConsumerRecord

from schemas import topics
from schemas.codec import CodecError
from schemas.fleet import FleetEvent
from schemas.handoff_records import Message, WorkerRole
from schemas.headers import ReplyTo
from schemas.priority import PriorityClass
from schemas.records import Cancellation, Dispatch, WorkerStatus
from schemas.token_records import TokenChunk
from workers.canary import CANARY_REQUEST_ID, CanaryFailedError
from workers.decision_log import DecisionLog
from workers.engine import EngineThread, StepResult
from workers.engine_watch import EngineWatch
from workers.handoff.role import HandoffRole
from workers.live_requests import End, LiveRequest, LiveRequests
from workers.metrics import WorkerMetrics
from workers.outbox import Outbox
from workers.preparation import Preparation
from workers.request import FinishReason, Request, RequestOutput
from workers.runners import LoadedEngine
from workers.sketch_beat import SketchBeat
from workers.text_rules import TextRules
from workers.worker_status import worker_status

log = logging.getLogger(__name__)

SIGN_OF_LIFE_S = 1.0


class Serving:
    """A `workers.mailbox.Receiver`, and the taker of the engine thread's results.

    When the canary fails, `on_canary_failed` gets the error, and nothing about any request is told any more,
    whatever this is called for.
    """

    def __init__(
        self,
        loaded: LoadedEngine,
        text_rules: TextRules,
        live: LiveRequests,
        thread: EngineThread,
        outbox: Outbox,
        decisions: DecisionLog,
        watch: EngineWatch,
        metrics: WorkerMetrics,
        *,
        on_dead_letter: Callable[[ConsumerRecord, str], None],
        on_canary_failed: Callable[[CanaryFailedError], None],
        role: WorkerRole = WorkerRole.UNIFIED,
    ) -> None:
        self.draining = False
        self.handoffs: HandoffRole | None = None
        """Of a worker that is not unified."""
        self._role = role
        self._loaded = loaded
        self._live = live
        self._thread = thread
        self._outbox = outbox
        self._decisions = decisions
        self._watch = watch
        self._metrics = metrics
        self._on_dead_letter = on_dead_letter
        self._on_canary_failed = on_canary_failed
        self._silenced = False
        self._sketch_beat = SketchBeat()
        self._preparation = Preparation(text_rules, self._prepared, self._unprepared)

    def close(self) -> None:
        """Drops what is not in the engine yet."""
        self._preparation.close()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, and all that was said is acked."""
        if self.handoffs is not None and not self.handoffs.is_idle:
            return False
        return not len(self._live) and self._outbox.is_empty

    def on_dispatch(self, dispatch: Dispatch, traceparent: str | None) -> None:
        if self._silenced:
            return
        handoffs = self.handoffs
        if handoffs is not None and handoffs.on_pairing(dispatch, traceparent):
            return
        taken = self._take(dispatch, traceparent)
        if taken is None:
            return
        if handoffs is not None:
            handoffs.on_whole(dispatch)
        live, end = taken
        if end is None:
            self._preparation.start(live)
        else:
            self.end(live, end)

    def on_read(self, priority: PriorityClass, next_offset: int) -> None:
        self._thread.note_read(priority, next_offset)

    def check_handoffs(self, now: float) -> None:
        """Raises an error that must end the run."""
        if self.handoffs is not None:
            self.handoffs.check(now)

    def on_handoff(self, message: Message, traceparent: str | None) -> None:
        if self.handoffs is not None and not self._silenced:
            self.handoffs.on_message(message, traceparent)

    def on_fleet_event(self, event: FleetEvent, offset: int) -> None:
        """For a unified worker other runs are nothing to heed."""
        if self.handoffs is not None:
            self.handoffs.on_fleet_event(event, offset)

    # For handoffs, which are a `workers.handoff.role.Host`'s

    def take(self, dispatch: Dispatch, traceparent: str | None) -> tuple[LiveRequest, End | None] | None:
        taken = self._take(dispatch, traceparent)
        if taken is not None:
            # The engine is not given this one until its KV is there.
            self._thread.abort(dispatch.request.request_id, dispatch.request.attempt - 1)
            if not self._silenced:
                self._outbox.send_taken(taken[0])
        return taken

    def is_cancelled(self, dispatch: Dispatch) -> bool:
        return self._live.is_cancelled(dispatch.request, time.monotonic())

    @property
    def canaries_begun(self) -> int:
        return self._watch.canaries_begun

    def disown(self, request: Request) -> None:
        if (live := self._live.of(request)) is not None:
            self.end(live, End(FinishReason.ENGINE_FAULT, "it goes on from what a worker computed wrong"))

    def prepare(self, live: LiveRequest) -> None:
        self._preparation.start(live)

    def end(self, live: LiveRequest, end: End) -> None:
        self._preparation.forget(live.request.request_id)
        self._end_unrun(live, end)

    def on_cancellation(self, cancellation: Cancellation) -> None:
        is_live = self._live.on_cancellation(cancellation, time.monotonic())
        if self.handoffs is not None:
            self.handoffs.on_cancellation(cancellation)
        if is_live:
            self._preparation.cancel(cancellation.request_id, cancellation.attempt)
            self._thread.abort(cancellation.request_id, cancellation.attempt)
            log.info(
                "cancelled",
                extra={"request_id": cancellation.request_id, "reason": cancellation.reason},
            )

    def on_undecodable(self, record: ConsumerRecord, to: ReplyTo | None, error: CodecError) -> None:
        if self._silenced:
            return
        kind = "dispatch" if record.topic == topics.PREFILL else "message"
        message = f"the {kind} cannot be decoded: {error}"
        log.error(message, extra={"offset": record.offset, "request_id": to.request_id if to else None})
        self._on_dead_letter(record, message)
        if to is not None:
            self._outbox.refuse(to, message)

    def on_results(self) -> None:
        """Sends what the engine has produced: one record a reply partition, however many steps piled up."""
        results = self._thread.take_results()
        if self._silenced:
            return
        try:
            self._send(results)
        except CanaryFailedError as error:
            self._silenced = True
            self._outbox.halt()
            if self.handoffs is not None:
                self.handoffs.halt()
            self._on_canary_failed(error)

    def _send(self, results: list[StepResult]) -> None:
        """Raises CanaryFailedError before anything of these results is sent."""
        now = time.monotonic()
        by_partition: dict[int, dict[bytes, TokenChunk]] = {}
        ends: list[tuple[LiveRequest, End]] = []
        for result in results:
            self._note_admitted(result)
            for event in result.batch.preempted:
                if event.victim.request_id != CANARY_REQUEST_ID:
                    self._decisions.preempted(event)
            for output in result.outputs:
                live = self._live.of(output.request)
                if live is None:  # the canary's; or superseded: its owner waits for a higher attempt
                    if self.handoffs is None or not self.handoffs.on_output(output):
                        self._watch.on_output(output)
                    continue
                if output.token_ids:
                    self._add_tokens(by_partition, live, output, now)
                    self._metrics.on_tokens(live, len(output.token_ids), result.ended)
                if output.finish_reason is not None:
                    ends.append((live, End(output.finish_reason, output.error, output.text_length)))
                    self._live.on_end(live, now)
        for partition, chunks in by_partition.items():
            self._outbox.send_tokens(partition, list(chunks.values()))
        for live, end in ends:
            self._send_end(live, end, now)

    def send_signs_of_life(self) -> None:
        """Names every live request that has shown nothing for a second."""
        if self._silenced:
            return
        now = time.monotonic()
        silent = [live for live in self._live if now - live.last_sign >= SIGN_OF_LIFE_S]
        for live in silent:
            live.last_sign = now
        self._outbox.send_signs_of_life(silent)

    def status(self) -> WorkerStatus:
        """For a heartbeat that is sent."""
        stats, loaded, now = self._thread.stats, self._loaded, time.monotonic()
        hasher = loaded.engine.kv_cache_manager.hasher
        shared = hasher is not None and hasher.is_shared
        status = worker_status(
            loaded,
            stats,
            draining=self.draining,
            step_age_s=self._thread.step_age(now),
            canary=self._watch.status(now),
            prefix_sketch=self._sketch_beat.sketch(stats.prefix_keys, shared=shared, now=now),
        )
        status.worker_role = self._role.value
        status.canary_passed = self._watch.canary_passed
        if self.handoffs is not None:
            self.handoffs.tell(status)
        return status

    def _note_admitted(self, result: StepResult) -> None:
        for request in result.batch.admitted:
            live = self._live.of(request)
            if live is not None:
                self._metrics.on_admitted(live, result.began)

    def _add_tokens(
        self,
        by_partition: dict[int, dict[bytes, TokenChunk]],
        live: LiveRequest,
        output: RequestOutput,
        now: float,
    ) -> None:
        request = live.request
        chunks = by_partition.setdefault(request.reply_partition, {})
        chunk = chunks.get(request.request_id)
        if chunk is None or chunk.attempt != request.attempt:
            chunk = TokenChunk(request.request_id, request.attempt, live.num_output_tokens, [])
            chunks[request.request_id] = chunk
        chunk.token_ids += output.token_ids
        chunk.logprobs += output.logprobs
        chunk.finish_reason = output.finish_reason
        live.num_output_tokens += len(output.token_ids)
        live.last_sign = now

    def _take(self, dispatch: Dispatch, traceparent: str | None) -> tuple[LiveRequest, End | None] | None:
        taken = self._live.on_dispatch(dispatch, time.monotonic(), traceparent)
        if taken is None:
            log.info(
                "dispatch ignored: another run's, a double, or overtaken",
                extra={"request_id": dispatch.request.request_id, "attempt": dispatch.request.attempt},
            )
        return taken

    def _prepared(self, request: Request) -> None:
        if self.handoffs is None or not self.handoffs.on_prepared(request):
            self._thread.add(request)

    def _unprepared(self, live: LiveRequest, end: End) -> None:
        if self.handoffs is None or not self.handoffs.on_unprepared(live.request, end):
            self._end_unrun(live, end)

    def _end_unrun(self, live: LiveRequest, end: End) -> None:
        """Ends a request that never came into the engine."""
        if self._silenced:
            return
        # A lower attempt that runs is not wanted any more either.
        self._thread.abort(live.request.request_id, live.request.attempt)
        now = time.monotonic()
        self._live.on_end(live, now)
        self._send_end(live, end, now)

    def _send_end(self, live: LiveRequest, end: End, now: float) -> None:
        self._outbox.end(live, end)
        self._metrics.on_end(live, end.reason, now)
        request = live.request
        log.info(
            "ended",
            extra={
                "request_id": request.request_id,
                "attempt": request.attempt,
                "finish_reason": str(end.reason),
                "output_tokens": live.num_output_tokens,
                **({"error": end.message} if end.message else {}),
            },
        )
