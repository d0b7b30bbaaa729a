"""Two workers, their blocks and a network that loses, doubles, delays and reorders, for the handoff protocol.

The sides are the real ones; memory is a number a block, so that every byte that lands is judged. What must
never be is raised as `Violation` where it happens.
"""

from random import Random

from schemas.records import (
    ContentCheck,
    Dispatch,
    Handoff,
    InferenceRequest,
    Offer,
    Pairing,
    PoolRank,
    Reserved,
    SamplingParams,
    TransferEnded,
)
from schemas.stream_state import Run
from tests.handoff_lives import (
    BLOCK_SIZE,
    DECODE_SLOT,
    JUMPS_S,
    LANDING_S,
    LAYOUT,
    LEASE_MS,
    NUM_BLOCKS,
    PREFILL_SLOT,
    RESERVE_MS,
    SILENCE_S,
    STOPS_S,
    Call,
    Decode,
    Prefill,
    Sequence,
    Violation,
    contents,
)
from workers.handoff.decode_side import DecodeSide
from workers.handoff.effects import (
    Adopt,
    Effect,
    FreeBlocks,
    Recompute,
    Reserve,
    RetryElsewhere,
    Send,
    StartWrites,
    StopPrefill,
    StopWrites,
    Verify,
)
from workers.handoff.prefill_side import PrefillSide, Written
from workers.handoff.states import TERMINAL

_REMEMBER_S = 1e9  # a message may be as late as those who stand still


class World:
    """`sound` lets bytes land as they were sent; else a call may land wrong ones or none, and say it did.

    A life that is stopped does nothing and hears nothing. What it had begun to write may land all the while,
    or when it goes on; what was sent to it lands before it ends, or when it goes on.
    """

    def __init__(self, random: Random, *, sound: bool = False) -> None:
        self.random = random
        self.sound = sound
        self.now = 0.0
        self.epoch = 10
        self.network: list[tuple[int, object]] = []
        self.flying: list[Call] = []
        self.cancelled: set[bytes] = set()
        self.offered: dict[bytes, int] = {}
        self.log: list[str] = []
        self.prefill = self._new_prefill()
        self.decode = self._new_decode()
        self.unheard: list[Run] = []  # runs that are over, which the other side has not heard of
        self.words: list[tuple[Prefill, bytes, Written | bool]] = []  # of the writer, on their way
        self.num_requests = 0

    def _new_prefill(self) -> Prefill:
        self.epoch += 1
        return Prefill(PrefillSide(Run(PREFILL_SLOT, self.epoch), LAYOUT, remember_s=_REMEMBER_S))

    def _new_decode(self) -> Decode:
        self.epoch += 1
        ranks = [PoolRank(f"decode-{self.epoch}", 0, 0, NUM_BLOCKS)]
        side = DecodeSide(
            Run(DECODE_SLOT, self.epoch),
            LAYOUT,
            ranks,
            landing_s=LANDING_S,
            ask_again_s=0.1,
            remember_s=_REMEMBER_S,
        )
        return Decode(side)

    # What may happen

    def dispatch(self) -> None:
        num_tokens = self.random.randint(1, 3 * BLOCK_SIZE)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        prefill, run = self.prefill, self.decode.side.run
        if num_blocks > prefill.pool.num_free_blocks or prefill.stopped_at is not None:
            return
        self.num_requests += 1
        request_id = self.num_requests.to_bytes(16, "big")
        request = InferenceRequest(
            request_id, 1, "t", 0, "m", [1] * num_tokens, [], SamplingParams(8), 0, 1, 0, 9000
        )
        pairing = Pairing(request_id, run.slot, run.epoch, RESERVE_MS, LEASE_MS)
        dispatch = Dispatch(PREFILL_SLOT, prefill.side.run.epoch, 8, request, pairing)
        prefill.sequences[request_id] = Sequence(dispatch, prefill.pool.allocate(num_blocks))
        prefill.deadlines[request_id] = self.now + LEASE_MS / 1000
        self._prefill_does(prefill.side.offer(dispatch, self.now))
        if self.random.random() < 0.1:  # a dispatch that comes twice
            self._prefill_does(prefill.side.offer(dispatch, self.now))

    def compute(self) -> None:
        if self.prefill.stopped_at is not None:
            return
        for transfer_id, sequence in list(self.prefill.sequences.items()):
            if sequence.computes and sequence.computed < len(sequence.blocks):
                expected = contents(transfer_id, len(sequence.dispatch.request.prompt_token_ids))
                self.prefill.memory[sequence.blocks[sequence.computed]] = expected[sequence.computed]
                sequence.computed += 1
                self._prefill_does(self.prefill.side.on_computed(transfer_id, self.now))
                self._finish(sequence)
                return

    def begin_call(self) -> None:
        if self.prefill.stopped_at is not None:
            return
        for transfer_id, sequence in self.prefill.sequences.items():
            if sequence.reserved and not sequence.stopping and sequence.begun < sequence.computed:
                index = sequence.begun
                sequence.begun += 1
                target = sequence.reserved.block_ids[index]
                call = Call(
                    transfer_id,
                    index,
                    sequence.blocks[index],
                    target,
                    self.prefill,
                    self._addressed(sequence),
                )
                sequence.calls.append(call)
                self.flying.append(call)
                return

    def land(self) -> None:
        landing = [call for call in self.flying if not call.has_landed]
        if landing:
            call = self.random.choice(landing)
            stands = call.prefill.stopped_at is not None or call.decode.stopped_at is not None
            if not stands or self.random.random() < 0.05:
                self._land(call)

    def end_call(self) -> None:
        """A call returns: well once it has landed, or with an error, after which it may still land."""
        if self.prefill.stopped_at is not None:
            return
        alive = [call for call in self.flying if call.prefill is self.prefill and not call.has_failed]
        if not alive:
            return
        call = self.random.choice(alive)
        sequence = self.prefill.sequences.get(call.transfer_id)
        if sequence is None:
            raise Violation(f"{call.transfer_id.hex()}: prefill freed blocks before a call has returned")
        if call.has_landed:
            self.flying.remove(call)
            sequence.calls.remove(call)
            self._finish(sequence)
        elif not call.has_failed and self.random.random() < 0.3:
            call.has_failed = True
            call.lands_by = self.now + LANDING_S
            sequence.calls.remove(call)
            sequence.may_land = True
            self._prefill_does(self.prefill.side.on_failed(call.transfer_id, "transport", self.now))

    def drop_call(self) -> None:
        """One that failed lands no more."""
        failed = [call for call in self.flying if call.has_failed]
        if failed:
            self.flying.remove(self.random.choice(failed))

    def deliver(self) -> None:
        if self.network:
            index = self.random.randrange(len(self.network))
            slot, record = self.network[index]
            if (self.prefill if slot == PREFILL_SLOT else self.decode).stopped_at is not None:
                return
            if self.sound or self.random.random() > 0.15:  # else it stays, and will come again
                del self.network[index]
            self._deliver(slot, record)

    def drop(self) -> None:
        if self.network:
            del self.network[self.random.randrange(len(self.network))]

    def engine_step(self) -> None:
        """Decode's engine takes what it was told, in order, then gives room to who waits."""
        decode = self.decode
        if decode.stopped_at is not None:
            return
        while decode.inputs:
            self._engine_takes(decode.inputs.popleft())
        for offer in list(decode.waiting):
            num_tokens = len(offer.request.prompt_token_ids)
            needed = -(-num_tokens // BLOCK_SIZE)
            if needed <= decode.pool.num_free_blocks:
                decode.waiting.remove(offer)
                decode.reserved[offer.transfer_id] = decode.pool.allocate(needed)
                room = list(decode.reserved[offer.transfer_id])
                self._decode_does(decode.side.on_room(offer.transfer_id, room, 0, self.now))
        for request_id, (blocks, expected) in decode.running.items():
            if [decode.memory[block] for block in blocks] != expected:
                raise Violation(f"{request_id.hex()} runs on wrong bytes")

    def verify(self) -> None:
        if self.decode.verifying and self.decode.stopped_at is None:
            handoff = self.decode.verifying.pop(0)
            blocks = self.decode.reserved.get(handoff.transfer_id, [])
            found = [self.decode.memory[block] for block in blocks]
            sent = [int.from_bytes(check.digest, "big") for check in handoff.content_checks]
            error = "" if found == sent else "content"
            self._decode_does(self.decode.side.on_verified(handoff.transfer_id, error, self.now))

    def finish_running(self) -> None:
        if self.decode.running and self.decode.stopped_at is None:
            request_id = self.random.choice(sorted(self.decode.running))
            self.decode.pool.free(self.decode.running.pop(request_id)[0])

    def cancel(self) -> None:
        known = [*self.prefill.sequences, *self.decode.deadlines]
        if known:
            transfer_id = self.random.choice(known)
            self.cancelled.add(transfer_id)
            if self.random.random() < 0.7 and self.prefill.stopped_at is None:
                self._prefill_does(self.prefill.side.cancel(transfer_id, "cancelled", self.now))
            if self.random.random() < 0.7 and self.decode.stopped_at is None:
                self._decode_does(self.decode.side.cancel(transfer_id, "cancelled", self.now))

    def preempt(self) -> None:
        if self.prefill.sequences and self.prefill.stopped_at is None:
            transfer_id = self.random.choice(list(self.prefill.sequences))
            self._prefill_does(self.prefill.side.on_failed(transfer_id, "preempted", self.now))

    def kill_prefill(self) -> None:
        old, self.prefill = self.prefill, self._new_prefill()
        self.unheard.append(old.side.run)
        old.died_at = self.now
        for call in self.flying:
            if call.prefill is old:
                call.lands_by = min(call.lands_by, self.now + LANDING_S)

    def kill_decode(self) -> None:
        old, self.decode = self.decode, self._new_decode()
        self.unheard.append(old.side.run)
        old.died_at = self.now

    def stop(self) -> None:
        """Rather decode while it waits for what may land."""
        life = self.random.choice((self.prefill, self.decode))
        if any(call.lands_by < float("inf") for call in self.flying) and self.random.random() < 0.9:
            life = self.decode
        if life.stopped_at is None:
            life.stopped_at = self.now

    def wake(self) -> None:
        """It looks at its clock before it hears anything."""
        if self.prefill.stopped_at is not None:
            self.prefill.stopped_at = None
            self._prefill_does(self.prefill.side.tick(self.now))
        if self.decode.stopped_at is not None:
            self.decode.stopped_at = None
            self._decode_does(self.decode.side.tick(self.now))

    def stand_still(self) -> None:
        if self.prefill.stopped_at is not None or self.decode.stopped_at is not None:
            self._pass(self.random.choice(STOPS_S))

    def suspect(self) -> None:
        """Decode hears nothing of prefill and serves without it; but that one may go on, amidst a call."""
        stopped_at = self.prefill.stopped_at
        if stopped_at is None or self.now - stopped_at < SILENCE_S or self.decode.stopped_at is not None:
            return
        for transfer_id in list(self.decode.deadlines):
            self._decode_does(self.decode.side.on_failed(transfer_id, "silent", self.now))

    def hear(self) -> None:
        if self.unheard and self.prefill.stopped_at is None and self.decode.stopped_at is None:
            run = self.unheard.pop(self.random.randrange(len(self.unheard)))
            self._prefill_does(self.prefill.side.on_gone(run, self.now))
            self._decode_does(self.decode.side.on_gone(run, self.now))

    def pass_time(self) -> None:
        self._pass(self.random.choice(JUMPS_S))

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        if self.decode.stopped_at is not None:
            for call in self.flying:  # to decode, but for those to lives that are over
                call.lands_by += seconds
        for call in [c for c in self.flying if c.lands_by <= self.now]:
            self.flying.remove(call)
        lives = [life for life in (self.prefill, self.decode) if life.stopped_at is None]
        if self.prefill in lives:
            self._prefill_does(self.prefill.side.tick(self.now))
        if self.decode in lives:
            self._decode_does(self.decode.side.tick(self.now))
        for life in lives:
            for transfer_id, deadline in life.deadlines.items():
                state = life.side.state(transfer_id)
                if self.now >= deadline and state is not None and state not in TERMINAL:
                    raise Violation(f"{transfer_id.hex()} is {state} behind its deadline")

    # What the sides want done

    def _prefill_does(self, effects: list[Effect]) -> None:
        prefill = self.prefill
        for effect in effects:
            match effect:
                case Send(slot, _, record):
                    self._check_closed(record)
                    self.network.append((slot, record))
                case StartWrites(reserved):
                    prefill.sequences[reserved.transfer_id].reserved = reserved
                    self._finish(prefill.sequences[reserved.transfer_id])
                case StopWrites(transfer_id):
                    prefill.sequences[transfer_id].stopping = True
                case StopPrefill(transfer_id):
                    prefill.sequences[transfer_id].computes = False
                case FreeBlocks(transfer_id):
                    sequence = prefill.sequences.pop(transfer_id)
                    if any(call.transfer_id == transfer_id for call in self._own_calls()):
                        raise Violation(f"{transfer_id.hex()}: prefill frees blocks that a call reads")
                    prefill.pool.free(sequence.blocks)
                    for block in sequence.blocks:
                        prefill.memory[block] = 0
                case _:
                    raise Violation(f"{effect} at prefill")

    def _decode_does(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(slot, _, record):
                    self.network.append((slot, record))
                case Verify(handoff):
                    self.decode.verifying.append(handoff)
                case Reserve(offer):
                    self.decode.deadlines[offer.transfer_id] = self.now + LEASE_MS / 1000
                    self.decode.inputs.append(effect)
                case Adopt(offer) | Recompute(offer) | RetryElsewhere(offer):
                    self._serve(offer, type(effect).__name__)
                    self.decode.inputs.append(effect)
                case FreeBlocks():
                    self.decode.inputs.append(effect)
                case _:
                    raise Violation(f"{effect} at decode")

    def _serve(self, offer: Offer, how: str) -> None:
        if offer.transfer_id in self.decode.served:
            raise Violation(f"{offer.transfer_id.hex()}: {how} after {self.decode.served[offer.transfer_id]}")
        self.decode.served[offer.transfer_id] = how

    def _engine_takes(self, effect: Effect) -> None:
        decode = self.decode
        match effect:
            case Reserve(offer):
                decode.waiting.append(offer)
            case FreeBlocks(transfer_id):
                decode.waiting = [o for o in decode.waiting if o.transfer_id != transfer_id]
                blocks = decode.reserved.pop(transfer_id, [])
                decode.pool.free(blocks)
                for block in blocks:
                    decode.memory[block] = 0
                if blocks and any(
                    c.transfer_id == transfer_id and c.decode is decode for c in self._landing()
                ):
                    raise Violation(f"{transfer_id.hex()}: decode frees blocks that a write may land in")
            case Adopt(offer):
                blocks = decode.reserved.pop(offer.transfer_id)
                expected = contents(offer.transfer_id, len(offer.request.prompt_token_ids))
                decode.running[offer.transfer_id] = (blocks, expected)
            case Recompute() | RetryElsewhere():
                pass
            case _:
                raise Violation(f"{effect} at decode's engine")

    # The network and the transport

    def _deliver(self, slot: int, record: object) -> None:
        if slot == PREFILL_SLOT:
            side = self.prefill.side
            if isinstance(record, Reserved):
                self._prefill_does(side.on_reserved(record, self.now))
            elif isinstance(record, TransferEnded):
                self._prefill_does(side.on_ended(record, self.now))
            return
        decode = self.decode.side
        if isinstance(record, Offer):
            recompute_by = self.now + self.random.choice((-1.0, 0.3, 10.0))
            if record.decode_epoch == decode.run.epoch:
                self.offered[record.transfer_id] = decode.run.epoch
            self._decode_does(decode.on_offer(record, recompute_by, self.now))
        elif isinstance(record, Handoff):
            self._decode_does(decode.on_handoff(record, self.now))
        elif isinstance(record, TransferEnded):
            self._decode_does(decode.on_ended(record, self.now))

    def _finish(self, sequence: Sequence) -> None:
        """The writer's words: all is written; or stopped, and no call runs."""
        transfer_id = sequence.dispatch.request.request_id
        if (
            sequence.calls
            or sequence.finished
            or sequence.closed
            or self.prefill.sequences.get(transfer_id) is not sequence
        ):
            return
        if sequence.stopping:
            if not sequence.closed:
                sequence.closed = True
                self.words.append((self.prefill, transfer_id, sequence.may_land))
        elif sequence.reserved and sequence.begun == len(sequence.blocks):
            sequence.finished = True
            checks = [
                ContentCheck(0, False, i, 0, 1, self.prefill.memory[block].to_bytes(8, "big"))
                for i, block in enumerate(sequence.blocks)
            ]
            self.words.append((self.prefill, transfer_id, Written(sequence.blocks, 5, checks)))

    def hear_writer(self) -> None:
        if self.words and self.prefill.stopped_at is None:
            prefill, transfer_id, word = self.words.pop(0)
            if prefill is not self.prefill:
                return
            if isinstance(word, Written):
                self._prefill_does(prefill.side.on_written(transfer_id, word, self.now))
            else:
                self._prefill_does(prefill.side.on_closed(transfer_id, self.now, may_land=word))

    def close_stopped(self) -> None:
        if self.prefill.stopped_at is not None:
            return
        for sequence in list(self.prefill.sequences.values()):
            if sequence.stopping:
                self._finish(sequence)

    def _land(self, call: Call) -> None:
        call.has_landed = True
        decode = call.decode
        if decode.died_at is not None:
            return
        sends = call.prefill.died_at is None and not call.has_failed  # else its bytes have left already
        value = call.prefill.memory[call.source] if sends else None
        expected = contents(call.transfer_id, BLOCK_SIZE * (call.index + 1))[call.index]
        if value is not None and value != expected:
            raise Violation(f"{call.transfer_id.hex()}: a source block was used again while it was read")
        if call.target not in decode.reserved.get(call.transfer_id, []):
            raise Violation(
                f"{call.transfer_id.hex()}: a write lands in block {call.target} of somebody else"
            )
        luck = 1.0 if self.sound else self.random.random()
        if luck > 0.1:
            decode.memory[call.target] = expected
        elif luck > 0.05:
            decode.memory[call.target] = 2

    def _own_calls(self) -> list[Call]:
        """That run at prefill."""
        ours = [call for call in self.flying if call.prefill is self.prefill]
        return [call for call in ours if not call.has_landed and not call.has_failed]

    def _landing(self) -> list[Call]:
        return [call for call in self.flying if not call.has_landed]

    def _addressed(self, sequence: Sequence) -> Decode:
        """The life of decode that the segment's name belongs to."""
        assert sequence.reserved is not None
        if sequence.reserved.decode_epoch == self.decode.side.run.epoch:
            return self.decode
        dead = Decode(self.decode.side)
        dead.died_at = self.now
        return dead

    def _check_closed(self, record: object) -> None:
        closed = isinstance(record, Handoff) or (isinstance(record, TransferEnded) and record.writes_closed)
        if closed:
            transfer_id = record.transfer_id  # type: ignore[attr-defined]
            if any(call.transfer_id == transfer_id for call in self._own_calls()):
                raise Violation(f"{transfer_id.hex()}: said to be closed while a call runs")
