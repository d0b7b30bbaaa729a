"""Both sides of the protocol, the writer's threads and real bytes, with a transport that fails and lies."""

import threading
from queue import Empty, Queue
from random import Random

import pytest

from schemas.handoff_records import Message
from schemas.records import (
    Dispatch,
    Handoff,
    InferenceRequest,
    Offer,
    Pairing,
    PoolRank,
    Reserved,
    SamplingParams,
)
from schemas.stream_state import Run
from tests.handoff_pools import Side, layout, token_kv
from workers.block_pool import BlockPool
from workers.handoff.decode_side import DecodeSide
from workers.handoff.effects import (
    Adopt,
    Effect,
    FreeBlocks,
    Recompute,
    Reserve,
    Send,
    StartWrites,
    StopPrefill,
    StopWrites,
    Verify,
)
from workers.handoff.kv_pool import compare
from workers.handoff.layout import Place
from workers.handoff.memory_transport import Fault, MemoryNetwork
from workers.handoff.prefill_side import PrefillSide, Written
from workers.handoff.transport import Copy
from workers.handoff.write_lane import WriteEvents, WriteLimits
from workers.handoff.writer import Writer

NUM_BLOCKS = 24
NUM_TOKENS = 40
BLOCKS = [3, 1, 8, 5, 2]


class Workers:
    """One prefill and one decode worker; messages are delivered at once, in order."""

    def __init__(self, fault: Fault, share: float, seed: int) -> None:
        random, lock = Random(seed), threading.Lock()

        def choose(copy: Copy) -> Fault:
            with lock:
                return fault if random.random() < share else Fault.NONE

        network = MemoryNetwork(choose)
        source, target = layout(8), layout(16)
        self.ours = Side.open(source, NUM_BLOCKS, lambda rank: network.join(f"prefill-{rank}"))
        self.theirs = Side.open(target, NUM_BLOCKS, lambda rank: network.join(f"decode-{rank}"))
        self.kv = token_kv(source, NUM_TOKENS, seed)
        self.ours.fill(BLOCKS, self.kv)
        [pool] = self.theirs.pools
        ranks = [PoolRank("decode-0", pool.keys_address, pool.values_address, NUM_BLOCKS)]
        self.prefill = PrefillSide(Run(0, 11), source)
        self.decode = DecodeSide(Run(1, 22), target, ranks, landing_s=1.0)
        self.pool = BlockPool(NUM_BLOCKS, 16)
        self.reserved: dict[bytes, list[int]] = {}
        self.outcome: dict[bytes, str] = {}
        self.words: Queue[tuple[str, bytes, object]] = Queue()
        events = WriteEvents(
            lambda transfer_id, checks: self.words.put(("written", transfer_id, checks)),
            lambda transfer_id, error: self.words.put(("failed", transfer_id, error)),
            lambda transfer_id, may_land: self.words.put(("closed", transfer_id, may_land)),
        )
        limits = WriteLimits(max_call_bytes=2048, max_call_copies=4, settle_s=0.0, check_all=True)
        self.writer = Writer(self.ours.pools[0], self.ours.transports[0], events, limits)

    def hand_over(self, transfer_id: bytes) -> str:
        """How the request is served: adopted, or why it is computed anew."""
        request = InferenceRequest(
            transfer_id, 1, "t", 0, "m", [1] * NUM_TOKENS, [], SamplingParams(8), 0, 1, 0, 9000
        )
        dispatch = Dispatch(0, 11, 8, request, Pairing(transfer_id, 1, 22, 100, 1000))
        self.do(self.prefill, self.prefill.offer(dispatch, 0.0))
        self.do(self.prefill, self.prefill.on_computed(transfer_id, 0.0))
        while self.prefill.state(transfer_id) is not None:
            try:
                word, named, told = self.words.get(timeout=20)
            except Empty:
                pytest.fail("the writer says nothing")
            if word == "written":
                assert isinstance(told, list)
                self.do(self.prefill, self.prefill.on_written(named, Written(BLOCKS, 5, told), 0.0))
            elif word == "failed":
                self.do(self.prefill, self.prefill.on_failed(named, str(told), 0.0))
            else:
                self.do(self.prefill, self.prefill.on_closed(named, 0.0, may_land=bool(told)))
        while (due := self.decode.next_due()) is not None and due <= 1.5:
            self.do(self.decode, self.decode.tick(due))
        return self.outcome[transfer_id]

    def do(self, side: PrefillSide | DecodeSide, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(slot, _, record):
                    self.deliver(slot, record)
                case Reserve(offer):
                    blocks = self.reserved[offer.transfer_id] = self.pool.allocate(3)
                    self.do(self.decode, self.decode.on_room(offer.transfer_id, list(blocks), 0, 0.0))
                case StartWrites(reserved):
                    self.writer.start(reserved, BLOCKS, NUM_TOKENS, float("inf"))
                    for layer in range(3):
                        self.writer.computed(reserved.transfer_id, range(NUM_TOKENS), range(layer, layer + 1))
                    self.writer.complete(reserved.transfer_id)
                case StopWrites(transfer_id):
                    self.writer.stop(transfer_id)
                case Verify(handoff):
                    [pool] = self.theirs.pools
                    place = Place(pool.shape, self.reserved[handoff.transfer_id])
                    error = compare(pool, place, NUM_TOKENS, handoff.content_checks)
                    self.do(self.decode, self.decode.on_verified(handoff.transfer_id, error, 0.0))
                case Adopt(offer):
                    self.outcome[offer.transfer_id] = "adopted"
                    blocks = self.reserved.pop(offer.transfer_id)
                    assert self.theirs.holds(blocks, self.kv), "served from wrong bytes"
                    self.pool.free(blocks)
                case Recompute(offer, reason):
                    self.outcome[offer.transfer_id] = reason
                case FreeBlocks(transfer_id):
                    if side is self.decode:
                        self.pool.free(self.reserved.pop(transfer_id))
                case StopPrefill():
                    pass
                case _:
                    pytest.fail(f"unexpected: {effect}")

    def deliver(self, slot: int, record: Message) -> None:
        if isinstance(record, Offer):
            self.do(self.decode, self.decode.on_offer(record, 10.0, 0.0))
        elif isinstance(record, Reserved):
            self.do(self.prefill, self.prefill.on_reserved(record, 0.0))
        elif isinstance(record, Handoff):
            self.do(self.decode, self.decode.on_handoff(record, 0.0))
        else:
            side = self.prefill if slot == 0 else self.decode
            self.do(side, side.on_ended(record, 0.0))


@pytest.mark.parametrize("fault", list(Fault))
def test_no_request_is_served_from_wrong_bytes(fault: Fault) -> None:
    outcomes: list[str] = []
    for seed in range(12):
        workers = Workers(fault, 0.0 if fault is Fault.NONE else 0.03, seed)
        outcomes += [workers.hand_over(bytes([seed, index]) * 8) for index in range(4)]
        assert workers.pool.num_free_blocks == NUM_BLOCKS
        assert workers.prefill.num_live == workers.decode.num_live == 0
        workers.writer.close()
    assert "adopted" in outcomes
    if fault is Fault.NONE:
        assert set(outcomes) == {"adopted"}
    else:
        kind = "content: " if fault in (Fault.LOST, Fault.FLIPPED) else "decode-0 "
        assert all(outcome == "adopted" or outcome.startswith(kind) for outcome in outcomes), outcomes
        assert set(outcomes) != {"adopted"}
