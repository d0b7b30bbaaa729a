"""A prefill worker's handoffs: it computes prompts, which go on at the decode run that admission named."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from schemas.fleet import FleetView
from schemas.handoff_records import Message, WorkerRole
from schemas.records import ContentCheck, Dispatch, Reserved, TransferEnded
from schemas.sampling import TokenLogprobs
from schemas.stream_state import Run
from workers.engine import EngineThread
from workers.handoff.effects import Effect, FreeBlocks, StartWrites, StopPrefill, StopWrites
from workers.handoff.kv_access import KVAccess
from workers.handoff.prefill_blocks import PrefillBlocks
from workers.handoff.prefill_side import PrefillSide, Written
from workers.handoff.role import HandoffRole, Host
from workers.handoff.sender import HandoffSender
from workers.handoff.source import Source
from workers.handoff.write_lane import WriteEvents, WriteLimits
from workers.handoff.writer import Writer
from workers.live_requests import End, LiveRequest
from workers.request import Request, RequestOutput
from workers.request_factory import make_request, request_error

log = logging.getLogger(__name__)

# A call that has not returned by then never will: its time limit is a fraction of it.
_WRITES_OPEN_S = 15.0


class WritesOpenError(RuntimeError):
    """A write to another worker does not return, whose blocks wait for this word or the run's end."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    dispatch: Dispatch
    request: Request
    source: Source
    first_token_id: int | None = None
    first_token_logprobs: TokenLogprobs | None = None
    computed_at: float = 0.0


class PrefillRole(HandoffRole):
    """`visible` is told for how long a transfer went on after its last token was computed (seconds)."""

    role = WorkerRole.PREFILL

    def __init__(
        self,
        run: Run,
        model: str,
        vocab_size: int,
        thread: EngineThread,
        kv: KVAccess,
        sender: HandoffSender,
        fleet: FleetView,
        host: Host,
        *,
        limits: WriteLimits | None = None,
        visible: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        layout = kv.pool.shape.layout
        self._prefill = PrefillSide(run, layout)
        super().__init__(run, layout, self._prefill, sender, fleet, clock)
        self._model, self._vocab_size = model, vocab_size
        self._thread = thread
        self._host = host
        self._visible = visible
        self._outgoing: dict[bytes, _Outgoing] = {}
        self._by_request: dict[Request, _Outgoing] = {}
        self._blocks = PrefillBlocks(
            thread.engine,
            kv.runner,
            partial(self._call_soon, self._on_first),
            partial(self._call_soon, self._fail),
        )
        thread.engine.watcher = self._blocks
        events = WriteEvents(
            partial(self._call_soon, self._on_written),
            partial(self._call_soon, self._fail),
            partial(self._call_soon, self._on_closed),
        )
        self.writer = Writer(kv.pool, kv.transport, events, limits or WriteLimits())

    @property
    def is_idle(self) -> bool:
        return not self._side.num_live and super().is_idle

    @property
    def bytes_per_s(self) -> float:
        return self.writer.counters.bytes_per_s

    def on_pairing(self, dispatch: Dispatch, traceparent: str | None) -> bool:
        pairing, wanted, now = dispatch.pairing, dispatch.request, self._clock()
        if pairing is None:
            return False
        if (dispatch.slot, dispatch.epoch) != (self.run.slot, self.run.epoch):
            return True
        peer = Run(pairing.decode_slot, pairing.decode_epoch)
        self._do(self._look_at(peer, now))
        effects = self._prefill.offer(dispatch, now)
        if not effects:  # a double
            return True
        self._sender.trace(pairing.transfer_id, traceparent)
        self.on_whole(dispatch)
        error = request_error(wanted, self._model, self._vocab_size)
        num_tokens = len(wanted.prompt_token_ids) + len(wanted.output_token_ids)
        until = time.monotonic() + pairing.lease_ms / 1000
        source = Source(pairing.transfer_id, num_tokens, self.writer, until)
        outgoing = _Outgoing(dispatch, _prompt_of(dispatch, is_valid=not error), source)
        self._outgoing[pairing.transfer_id] = outgoing
        self._by_request[outgoing.request] = outgoing
        self._do(effects)
        # What cannot run, decode finds out as well, and tells.
        if self._host.is_cancelled(dispatch):
            self._do(self._prefill.cancel(pairing.transfer_id, "cancelled", now))
        elif error:
            self._do(self._prefill.on_failed(pairing.transfer_id, "bad_request", now))
        elif outgoing.request in self._by_request:
            self._host.prepare(_unheard(outgoing.request, dispatch, now))
        return True

    def on_prepared(self, request: Request) -> bool:
        outgoing = self._by_request.get(request)
        if outgoing is None:
            return self._is_prompt(request)
        self._thread.call(partial(self._blocks.begin, outgoing.source, request))
        return True

    def on_unprepared(self, request: Request, end: End) -> bool:
        if (outgoing := self._by_request.get(request)) is not None:
            self._do(self._fail(outgoing.source.transfer_id, "unprepared"))
            return True
        return self._is_prompt(request)

    def on_output(self, output: RequestOutput) -> bool:
        outgoing = self._by_request.get(output.request)
        if outgoing is None:
            return False
        if output.token_ids and outgoing.first_token_id is None:
            outgoing.first_token_id = output.token_ids[0]
            outgoing.first_token_logprobs = output.logprobs[0] if output.logprobs else None
            outgoing.computed_at = self._clock()
            outgoing.source.complete()
        elif output.finish_reason is not None and outgoing.first_token_id is None:
            self._do(self._fail(outgoing.source.transfer_id, output.error or str(output.finish_reason)))
        return True

    def on_whole(self, dispatch: Dispatch) -> None:
        self._give_up(dispatch.request.request_id, dispatch.request.attempt, "superseded")

    def check(self, now: float) -> None:
        since = self._prefill.writes_open_since()
        if since is not None and now - since > _WRITES_OPEN_S:
            raise WritesOpenError(f"a write of KV has not returned for {now - since:.0f} s")

    async def close(self) -> None:
        await super().close()
        # Bounded by the time limit of a call.
        await self._loop.run_in_executor(None, self.writer.close)

    def _cancel(self, request_id: bytes, attempt: int) -> None:
        self._give_up(request_id, attempt, "cancelled")

    def _give_up(self, request_id: bytes, attempt: int, reason: str) -> None:
        for outgoing in list(self._outgoing.values()):
            request = outgoing.request
            if request.request_id == request_id and request.attempt <= attempt:
                self._do(self._prefill.cancel(outgoing.source.transfer_id, reason, self._clock()))

    def _received(self, message: Message, traceparent: str | None) -> list[Effect]:
        if isinstance(message, Reserved):
            return self._prefill.on_reserved(message, self._clock())
        if isinstance(message, TransferEnded):
            return self._prefill.on_ended(message, self._clock())
        log.warning("a message for decode workers", extra={"kind": type(message).__name__})
        return []

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartWrites(reserved):
                self._outgoing[reserved.transfer_id].source.start(reserved)
            case StopWrites(transfer_id):
                self.writer.stop(transfer_id)
            case StopPrefill(transfer_id, reason):
                self.counts["stopped"] += 1
                log.info("a handoff is over", extra={"transfer": transfer_id.hex(), "reason": reason})
                self._thread.call(partial(self._blocks.stop, transfer_id))
            case FreeBlocks(transfer_id):
                self._thread.call(partial(self._blocks.release, transfer_id))
                if (outgoing := self._outgoing.pop(transfer_id, None)) is not None:
                    del self._by_request[outgoing.request]
            case _:
                raise AssertionError(f"{type(effect).__name__} is not prefill's")

    def _look_at(self, peer: Run, now: float) -> list[Effect]:
        if not self._gone(peer):
            return []
        self.writer.forget(peer.slot, peer.epoch)
        return self._prefill.on_gone(peer, now)

    def _on_first(self, transfer_id: bytes) -> list[Effect]:
        return self._prefill.on_computed(transfer_id, self._clock())

    def _fail(self, transfer_id: bytes, reason: str) -> list[Effect]:
        return self._prefill.on_failed(transfer_id, reason, self._clock())

    def _on_closed(self, transfer_id: bytes, may_land: bool) -> list[Effect]:
        return self._prefill.on_closed(transfer_id, self._clock(), may_land=may_land)

    def _on_written(self, transfer_id: bytes, checks: list[ContentCheck]) -> list[Effect]:
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            return []
        assert outgoing.first_token_id is not None, "complete is said behind the first token"
        now = self._clock()
        self.counts["written"] += 1
        self._visible(now - outgoing.computed_at)
        written = Written(
            list(outgoing.source.block_ids),
            outgoing.first_token_id,
            checks,
            outgoing.request.num_cached_tokens,
            outgoing.first_token_logprobs,
            self._host.canaries_begun,
        )
        return self._prefill.on_written(transfer_id, written, now)

    def _is_prompt(self, request: Request) -> bool:
        """Of a handoff that is over."""
        return request.reply_partition == _NOBODY


# A prompt's request answers nobody: no reply partition holds it up.
_NOBODY = -2


def _prompt_of(dispatch: Dispatch, *, is_valid: bool) -> Request:
    """The engine's request for all that is known, and one token. Stop strings are decode's to find."""
    wanted = dispatch.request
    sampling = replace(wanted.sampling, max_tokens=len(wanted.output_token_ids) + 1, stop=[])
    only_prompt = replace(dispatch, request=replace(wanted, sampling=sampling), expected_output_tokens=1)
    request = make_request(only_prompt, is_valid=is_valid)
    request.reply_partition = _NOBODY
    return request


def _unheard(request: Request, dispatch: Dispatch, now: float) -> LiveRequest:
    """For those who prepare requests: of nobody's live ones."""
    wanted = dispatch.request
    return LiveRequest(
        request, wanted.tenant, wanted.accepted_at, None, now, len(wanted.output_token_ids), now
    )
