"""Random engine steps over a manager whose blocks' contents are kept: what is found is what it claims."""

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.priority import PriorityClass
from schemas.records import SamplingParams
from workers.block_hash import BlockHasher, PrefixSharing
from workers.block_pool import BlockPool
from workers.kv_cache_manager import make_kv_cache_manager
from workers.request import Request

BLOCK_SIZE = 4

Content = tuple[str, tuple[int, ...]]
"""What a slot holds: whose KV it is, and the tokens up to its own. KV depends on all of them."""


@dataclass
class Memory:
    """Blocks of slots, as a runner has them: everything that was written and not overwritten is there."""

    slots: dict[tuple[int, int], Content | None] = field(default_factory=dict)

    def write(self, request: Request, position: int, owner: str) -> None:
        tokens = (request.prompt_token_ids + request.output_token_ids)[: position + 1]
        block = request.block_table[position // BLOCK_SIZE]
        self.slots[block, position % BLOCK_SIZE] = (owner, tuple(tokens))

    def copy(self, block: int, target: "Memory", target_block: int) -> None:
        for slot in range(BLOCK_SIZE):
            target.slots[target_block, slot] = self.slots.get((block, slot))


def expected(request: Request, position: int, owner: str) -> Content:
    return owner, tuple((request.prompt_token_ids + request.output_token_ids)[: position + 1])


class PrefixCacheMachine(RuleBasedStateMachine):
    """Plans a step by random calls, executes it in the order that a runner does, and plans the next one.

    Prompts are cut from few sources, so prefixes collide, and the pools are small, so they churn.
    """

    waiting: list[Request]
    running: list[Request]

    @initialize(
        num_blocks=st.integers(4, 14),
        num_host_blocks=st.integers(0, 8),
        sharing=st.sampled_from(PrefixSharing),
    )
    def start(self, num_blocks: int, num_host_blocks: int, sharing: PrefixSharing) -> None:
        hasher = BlockHasher("m", "l", sharing, BLOCK_SIZE)
        self.manager = make_kv_cache_manager(
            num_blocks, num_host_blocks=num_host_blocks, hasher=hasher, block_size=BLOCK_SIZE
        )
        self.sharing = sharing
        self.device, self.host = Memory(), Memory()
        self.numbers = itertools.count(1)
        self.waiting, self.running = [], []
        self.came_in: list[Request] = []
        self.swapping_in: list[int] = []
        self.planned: dict[bytes, int] = {}
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.chains: dict[bytes, Content] = {}

    def owner(self, request: Request) -> str:
        return request.tenant if self.sharing is PrefixSharing.TENANT else ""

    @rule(
        source=st.sampled_from([1, 2]),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(0, 1), max_size=3),
        num_resumed=st.integers(0, 8),
        tenant=st.sampled_from(["a", "b"]),
    )
    def add(self, source: int, length: int, tail: list[int], num_resumed: int, tenant: str) -> None:
        tokens = [source] * length + tail
        cut = max(1, len(tokens) - num_resumed)
        self.waiting.append(
            Request(
                request_id=next(self.numbers).to_bytes(16, "big"),
                attempt=1,
                priority=PriorityClass.FREE,
                prompt_token_ids=tokens[:cut],
                sampling=SamplingParams(max_tokens=100),
                reply_partition=0,
                output_token_ids=tokens[cut:],
                tenant=tenant,
            )
        )

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunk=st.integers(1, 12))
    def admit(self, data: st.DataObject, chunk: int) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        manager = self.manager
        before = manager.num_free_blocks
        if request.host_block_table:
            num_tokens, host_blocks = request.num_computed_tokens, request.host_block_table
            needed = manager.num_new_blocks_for(request, num_tokens)
            pairs = manager.swap_in(request)
            assert (pairs is None) == (needed > before)
            if pairs is None:
                assert manager.num_free_blocks == before
                return
            self.swap_in += pairs
            self.swapping_in += host_blocks
            assert request.num_computed_tokens == num_tokens
        else:
            cached = manager.find_cached(request)
            num_tokens = min(cached + chunk, request.num_tokens)
            needed = manager.num_new_blocks_for(request, num_tokens)
            if needed > before:
                return
            assert manager.take_cached(request) == cached < request.num_tokens
            assert manager.allocate_slots(request, num_tokens - cached)
            self.planned[request.request_id] = num_tokens - cached
        assert manager.num_free_blocks == before - needed
        self.waiting.remove(request)
        self.running.append(request)
        self.came_in.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(1, 12))
    def compute(self, data: st.DataObject, chunk: int) -> None:
        request = data.draw(st.sampled_from(self.running))
        if request.request_id in self.planned:
            return
        chunk = min(chunk, request.num_tokens - request.num_computed_tokens)
        table = list(request.block_table)
        if self.manager.allocate_slots(request, chunk):
            self.planned[request.request_id] = chunk
        else:
            assert request.block_table == table

    @precondition(lambda self: self.running)
    @rule(data=st.data(), swap=st.booleans())
    def preempt(self, data: st.DataObject, swap: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        if request in self.came_in:
            return
        computed = request.num_computed_tokens
        pairs = self.manager.swap_out(request) if swap else None
        if pairs is None:
            self.manager.free(request)
            request.num_computed_tokens = 0
        else:
            self.swap_out += pairs
            assert request.num_computed_tokens == computed
        request.num_preemptions += 1
        self.planned.pop(request.request_id, None)
        self.running.remove(request)
        self.waiting.append(request)

    @rule()
    def execute(self) -> None:
        for device_block, host_block in self.swap_out:
            self.device.copy(device_block, self.host, host_block)
        for host_block, device_block in self.swap_in:
            self.host.copy(host_block, self.device, device_block)
        for request in self.running:
            num_tokens = self.planned.get(request.request_id, 0)
            start = request.num_computed_tokens
            for position in range(start, start + num_tokens):
                assert self.manager.pool.ref_cnt(request.block_table[position // BLOCK_SIZE]) == 1
                self.device.write(request, position, self.owner(request))
        for request in self.running:
            request.num_computed_tokens += self.planned.get(request.request_id, 0)
            if request.num_computed_tokens == request.num_tokens:
                request.output_token_ids.append(request.num_tokens % 3)
            self.manager.cache_computed(request)
            for index, block_hash in enumerate(request.block_hashes):
                chain = expected(request, (index + 1) * BLOCK_SIZE - 1, self.owner(request))
                assert self.chains.setdefault(block_hash, chain) == chain, "one hash, two contents"
        self.manager.release_swapped_in()
        self.swap_out, self.swap_in, self.swapping_in, self.came_in, self.planned = [], [], [], [], {}

    @precondition(lambda self: not (self.planned or self.swap_out or self.swap_in))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        requests = self.running + self.waiting
        if not requests:
            return
        request = data.draw(st.sampled_from(requests))
        self.manager.free(request)
        (self.running if request in self.running else self.waiting).remove(request)

    @invariant()
    def held_blocks_balance_in_both_pools(self) -> None:
        requests = self.running + self.waiting
        check_pool(self.manager.pool, [r.block_table for r in requests])
        if self.manager.host_pool is not None:
            check_pool(self.manager.host_pool, [self.swapping_in, *(r.host_block_table for r in requests)])

    @precondition(lambda self: not (self.swap_out or self.swap_in))
    @invariant()
    def a_request_attends_to_its_own_tokens_alone(self) -> None:
        for request in self.running + self.waiting:
            memory, table = self.device, request.block_table
            if request.host_block_table:
                memory, table = self.host, request.host_block_table
            for position in range(request.num_computed_tokens):
                slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                assert memory.slots[slot] == expected(request, position, self.owner(request))

    @precondition(lambda self: not (self.swap_out or self.swap_in))
    @invariant()
    def a_cached_block_holds_the_tokens_of_its_hash(self) -> None:
        for block_hash, (owner, tokens) in self.chains.items():
            for block in self.manager.pool.find([block_hash]):
                for slot in range(BLOCK_SIZE):
                    end = len(tokens) - BLOCK_SIZE + slot + 1
                    assert self.device.slots[block, slot] == (owner, tokens[:end])

    @invariant()
    def unused_slots_are_counted(self) -> None:
        used = {
            (request.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            for request in self.running
            for position in range(request.num_computed_tokens)
        }
        held = (self.manager.pool.num_blocks - self.manager.pool.num_free_blocks) * BLOCK_SIZE
        assert self.manager.num_unused_slots(self.running) == held - len(used)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.execute()
        for request in self.running + self.waiting:
            self.manager.free(request)
        assert self.manager.num_free_blocks == self.manager.pool.num_blocks
        if self.manager.host_pool is not None:
            assert self.manager.host_pool.num_free_blocks == self.manager.host_pool.num_blocks


def check_pool(pool: BlockPool, tables: list[list[int]]) -> None:
    held = [block for table in tables for block in table]
    for block in range(pool.num_blocks):
        assert pool.ref_cnt(block) == held.count(block)
    assert pool.num_free_blocks == pool.num_blocks - len(set(held))


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=200, stateful_step_count=40)
