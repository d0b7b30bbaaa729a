"""What becomes of one request that this gateway owns: lost, retried, cancelled, failed, ended. Pure.

It acts on its own `Retry` and `Failed` only after reading them back, so a Completion that came first wins.
"""

from collections.abc import Mapping
from dataclasses import replace

from gateway.actions import Action, Announce, Reply, SendRequest
from gateway.attendance import abandoned
from gateway.ends import REQUEST_TOO_LARGE, error_of
from gateway.owned_request import OwnedRequest
from gateway.replay import RETRY_WAIT_MS
from gateway.resend import MAX_RESENDS, should_send_again
from schemas.api.errors import ApiError
from schemas.fleet import FleetView
from schemas.records import Attach, Claim, Completion, Failed, PartitionStatus, Rejected, Retry
from schemas.stream_state import (
    DEADLINE_EXCEEDED,
    ENGINE_FAULT,
    PREFILL_LOST,
    RETRYABLE_FINISHES,
    Effect,
    Run,
)

NO_SIGN_MS = 3_000
STALLED_MS = 500  # some heartbeats: a worker gets over a step that lasts a little too long
MAX_RETRIES = 3
_STRAY_CANCEL_MS = 1_000
_LATE_MS = 2_000  # by then the log says the end, unless it stands still


class Lifecycle:
    """Decides; every method returns the actions to take, in order, or adds them to `actions`.

    `clock` is the log's (ms), as of the last tick.
    """

    def __init__(self, slot: int, epoch: int, cancel_timeout_ms: int, kept_ms: int) -> None:
        self.slot = slot
        self.epoch = epoch
        self.clock = 0
        self._cancel_timeout_ms = cancel_timeout_ms
        self._kept_ms = kept_ms

    def owns(self, owned: OwnedRequest) -> bool:
        """False once another's Claim was read: what is left is to show the stream to a client here."""
        return owned.state.owner_epoch in (None, self.epoch)

    def cancel(self, owned: OwnedRequest, reason: str, *, told: bool = False) -> list[Action]:
        """Stops the work. Who reads is told when the log says the end. `told`: readers elsewhere know why."""
        if owned.cancelled is not None or owned.over:
            return []
        owned.cancelled, owned.cancelled_clock = reason, self.clock
        cancel = owned.cancellation(reason)
        # Of a late one the end itself says why: see _on_end.
        owned.told_why = told or owned.waived or reason == DEADLINE_EXCEEDED
        return [*(self.tell_why(owned) if owned.is_told_elsewhere else []), cancel]

    def tell_why(self, owned: OwnedRequest) -> list[Action]:
        """Others read it, or may: of what was cancelled they learn so, and need not wait to see a retry."""
        if owned.cancelled is None or owned.told_why or not (owned.state.may_retry and self.owns(owned)):
            return []
        owned.told_why = True
        return [Announce(owned.cancellation(owned.cancelled).record, owned.request.reply_partition)]

    def abandon(self, owned: OwnedRequest, reason: str) -> list[Action]:
        """The client is gone, or was given up: stop the work. The state stays until the log says the end."""
        owned.reader = None
        return self.cancel(owned, reason)

    def check(
        self, owned: OwnedRequest, view: FleetView, admission: Mapping[int, PartitionStatus], now_ms: int
    ) -> list[Action]:
        request, run = owned.request, owned.state.run
        if not self.owns(owned):
            return self._check_owner(owned, view)
        if owned.cancelled is not None:
            late = now_ms - request.accepted_at - request.end_ms >= _LATE_MS
            if late and owned.reader is not None and owned.cancelled == DEADLINE_EXCEEDED:
                owned.reader.on_end(ApiError(504, DEADLINE_EXCEEDED, _too_late(owned)))
            if self.clock - owned.cancelled_clock >= self._cancel_timeout_ms:
                return self._fail(owned, "cancelled", "cancelled; its end did not come in time")
        elif now_ms - request.accepted_at >= request.end_ms:
            return self.cancel(owned, DEADLINE_EXCEEDED)
        elif abandoned(owned, view, self.clock):
            return self.abandon(owned, "disconnected")
        if run is not None:
            return self._check_run(owned, run, view)
        if owned.oversized:
            message = "the request and the output that it has are larger than a record of the log may be"
            return self._fail(owned, REQUEST_TOO_LARGE, message)
        status = admission.get(owned.partition)
        if status is None or owned.offset is None or owned.cancelled is not None:
            return []
        if owned.read_clock is None and status.read_offset > owned.offset:
            owned.read_clock = self.clock
        since_read = 0 if owned.read_clock is None else self.clock - owned.read_clock
        if not should_send_again(owned.offset, owned.state.requests_offset, status, since_read):
            return []
        if owned.resends >= MAX_RESENDS:
            return self._fail(
                owned, "no_answer", "the request was sent four times without an answer; try again"
            )
        owned.resends += 1
        owned.offset = owned.read_clock = None
        return [SendRequest(owned)]

    def _check_owner(self, owned: OwnedRequest, view: FleetView) -> list[Action]:
        state = owned.state
        if owned.ended_clock is not None and self.clock - owned.ended_clock >= RETRY_WAIT_MS:
            self._tell_end(owned)
            return []
        assert state.owner_slot is not None
        assert state.owner_epoch is not None
        lost = view.gone("gateway", state.owner_slot, state.owner_epoch) is not None
        if not lost or owned.claimed_from == state.owner_epoch:
            return []
        owned.claimed_from = state.owner_epoch
        claim = Claim(state.owner_epoch, self.slot, self.epoch, owned.request.request_id)
        return [Announce(claim, owned.request.reply_partition)]

    def _check_run(self, owned: OwnedRequest, run: Run, view: FleetView) -> list[Action]:
        if owned.sign_clock is None or owned.sign_at != owned.state.last_sign_at:
            owned.sign_at, owned.sign_clock = owned.state.last_sign_at, self.clock
        if view.computes_wrong(run.slot, run.epoch):
            return self._distrust(owned, "the worker that ran this request computed wrong tokens")
        if not view.stalled(run.slot, run.epoch):
            owned.stalled_clock = None
        elif owned.stalled_clock is None:
            owned.stalled_clock = self.clock
        elif self.clock - owned.stalled_clock >= STALLED_MS:
            return self._lose(owned, "engine_stalled", "the engine that ran this request stands still")
        why = view.gone("worker", run.slot, run.epoch)
        if why is None and view.may_judge and self.clock - owned.sign_clock >= NO_SIGN_MS:
            why = "gives no sign of this request"
        if why is not None:
            return self._lose(owned, "worker_lost", f"the worker that ran this request was lost ({why})")
        return self._check_prefill(owned, view)

    def _check_prefill(self, owned: OwnedRequest, view: FleetView) -> list[Action]:
        """Of a request that the bound run was not given yet, as far as the log says. The last attempt is not
        given up for that: maybe it was."""
        prefill = owned.state.prefill
        if prefill is None or owned.cancelled is not None or owned.state.attempt > MAX_RETRIES:
            return []
        if not view.computes_wrong(*prefill) and view.gone("worker", *prefill) is None:
            return []
        return self._lose(owned, PREFILL_LOST, "the worker that was to compute its prompt was lost")

    def _distrust(self, owned: OwnedRequest, message: str) -> list[Action]:
        """What the run has told may be wrong: nothing is built on it, and nobody pays for it."""
        if len(owned.state.token_ids) > owned.state.num_carried:
            return self._fail(owned, ENGINE_FAULT, message)
        return self._lose(owned, ENGINE_FAULT, message)

    def on_effect(
        self,
        owned: OwnedRequest,
        effect: Effect,
        run: Run | None,
        attempt: int,
        timestamp_ms: int,
        actions: list[Action],
    ) -> None:
        match effect:
            case Effect.BOUND:
                if owned.reader is not None:
                    owned.reader.on_bound(owned.state.model)
            case Effect.GAP:
                actions += self._lose(owned, "output_gap", "a part of the output was lost")
            case Effect.CLAIMED:
                self._on_claimed(owned, timestamp_ms, actions)
            case Effect.RETRIED:
                self._on_retried(owned, actions)
            case Effect.KEPT:
                self._on_kept(owned, timestamp_ms, actions)
            case Effect.STRAY:
                assert run is not None
                self.cancel_stray(owned, run, attempt, actions)
            case Effect.ENDED:
                self._on_end(owned, timestamp_ms, actions)

    def _on_claimed(self, owned: OwnedRequest, timestamp_ms: int, actions: list[Action]) -> None:
        owned.retrying, owned.failing = None, False
        if self.owns(owned):
            owned.kept_until = self.clock + self._kept_ms
            self.take_over(owned, timestamp_ms, actions)
        elif owned.reader is not None:
            # Its new owner learns that someone reads here.
            word = Attach(owned.request.request_id, self.slot, self.epoch)
            actions.append(Announce(word, owned.request.reply_partition))

    def take_over(self, owned: OwnedRequest, timestamp_ms: int, actions: list[Action]) -> None:
        """What was another owner's is ours from here on; what that one may have left undone is done."""
        state = owned.state
        owned.request = replace(
            owned.request,
            attempt=state.attempt,
            owner_epoch=self.epoch,
            output_token_ids=list(state.token_ids),
        )
        owned.ended_clock = None
        owned.unread_clock = self.clock
        if state.end is not None:
            self._on_end(owned, timestamp_ms, actions)
        elif owned.cancelled is not None:
            if state.run is None:
                actions += self._fail(owned, "cancelled", "nobody waited for it any more")
            else:
                actions.append(owned.cancellation(owned.cancelled))
        elif state.gap is not None:
            actions += self._lose(owned, "output_gap", "a part of the output was lost")
        elif state.run is None:
            if state.attempt > 1:
                actions.append(owned.earlier_cancellation("worker_lost"))
            owned.offset = owned.read_clock = None
            actions.append(SendRequest(owned))

    def _on_end(self, owned: OwnedRequest, timestamp_ms: int, actions: list[Action]) -> None:
        end = owned.state.end
        if isinstance(end, Completion) and end.finish_reason in RETRYABLE_FINISHES:
            if not self.owns(owned) and owned.cancelled is None:
                owned.ended_clock = self.clock
                return
            if owned.retrying or owned.cancelled is None:
                # Only the attempt is over.
                text = end.message or "the worker cancelled this request"
                if end.finish_reason == ENGINE_FAULT:
                    actions += self._distrust(owned, text)
                elif end.finish_reason == "error":
                    actions += self._fail(owned, "engine_error", text)
                else:
                    actions += self._lose(owned, "worker_cancelled", text)
                return
            if owned.cancelled == DEADLINE_EXCEEDED and self.owns(owned):
                # Who reads it later hears what its client does.
                actions += self._fail(owned, DEADLINE_EXCEEDED, "")
                return
        if self.owns(owned):
            if isinstance(end, Failed):
                actions.append(owned.cancellation(end.code))
            owned.ended_at = timestamp_ms
            self._seal(owned, actions)
        self._tell_end(owned)

    def _seal(self, owned: OwnedRequest, actions: list[Action]) -> None:
        bill = None if owned.sealed else owned.final_bill(owned.ended_at)
        if bill is not None:
            owned.sealed = True
            actions.append(bill)

    def _tell_end(self, owned: OwnedRequest) -> None:
        end = owned.state.end
        if owned.reader is not None:
            match end:
                case Completion():
                    owned.reader.on_end(end)
                case Rejected() | Failed():
                    owned.reader.on_end(error_of(end))
        owned.over = True

    def cancel_stray(self, owned: OwnedRequest, run: Run, attempt: int, actions: list[Action]) -> None:
        if owned.over and attempt == owned.state.attempt and self.owns(owned):
            # It writes a row as well, which may rank above that of the run that counts.
            owned.state.strays.add(run)
            self._seal(owned, actions)
        last = owned.stray_cancels.get(run)
        if last is not None and self.clock - last < _STRAY_CANCEL_MS:
            return
        owned.stray_cancels[run] = self.clock
        actions.append(owned.stray_cancellation(run, attempt))

    def _lose(self, owned: OwnedRequest, code: str, message: str) -> list[Action]:
        """The attempt is over, the request is not: another one goes on where it stopped, if it may."""
        if owned.retrying or owned.failing or not self.owns(owned):
            return []
        request, attempt = owned.request, owned.state.attempt
        if owned.cancelled is not None or attempt > MAX_RETRIES:
            return self._fail(owned, code, message)
        owned.retrying = code
        retry = Retry(request.request_id, attempt + 1, self.epoch, code)
        return [Reply(retry, request.reply_partition, owned.traceparent)]

    def _on_retried(self, owned: OwnedRequest, actions: list[Action]) -> None:
        code, owned.retrying = owned.retrying or "", None
        owned.ended_clock = None
        if not self.owns(owned):
            return
        # A run that only seemed lost goes on for nobody.
        actions.append(owned.earlier_cancellation(code))
        if owned.cancelled is not None:
            actions += self._fail(owned, "cancelled", "cancelled while another attempt was to begin")
            return
        owned.begin_attempt()
        actions.append(SendRequest(owned))

    def _on_kept(self, owned: OwnedRequest, timestamp_ms: int, actions: list[Action]) -> None:
        """What the attempt told meanwhile, when it was to be over, is looked at now."""
        owned.retrying = None
        if owned.over or not self.owns(owned):
            return
        if owned.state.end is not None:
            self._on_end(owned, timestamp_ms, actions)
        elif owned.state.gap is not None:
            actions += self._lose(owned, "output_gap", "a part of the output was lost")

    def _fail(self, owned: OwnedRequest, code: str, message: str) -> list[Action]:
        """Says the end. It is one when it is read back and nothing else was first."""
        if owned.failing or owned.retrying or not self.owns(owned):
            return []
        owned.failing = True
        if owned.cancelled == DEADLINE_EXCEEDED:
            code, message = DEADLINE_EXCEEDED, _too_late(owned)
        elif owned.cancelled is not None:
            code = "cancelled"
        request, state = owned.request, owned.state
        failed = Failed(request.request_id, state.attempt, self.epoch, code, message)
        return [Reply(failed, request.reply_partition, owned.traceparent)]


def _too_late(owned: OwnedRequest) -> str:
    return f"not finished within {owned.request.end_ms / 1000:g} s"
