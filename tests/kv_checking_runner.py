"""A runner that keeps what a KV cache would hold, and checks at each step that it is what it should be."""

from workers.batch import RunnerOutput, SchedulerOutput
from workers.request import Request
from workers.simulated_runner import SimulatedRunner

BLOCK_SIZE = 16
# A slot holds the hash of all tokens up to its own and of the tenant for whom it was computed; 0: nothing.
Block = list[int]


class KVCheckingRunner(SimulatedRunner):
    """Tokens are those of the simulated runner. Raises AssertionError when a sequence would attend to KV that
    is not that of its own tokens, when a copy or a write could meet another one, or when the KV that it
    attends to was computed for another tenant and `shared` is false.

    `now` is a clock that each step moves on by a fixed time, some for each sequence and some for each token.
    """

    def __init__(self, *, shared: bool, unit_s: float = 0.0, vocab_size: int = 1000) -> None:
        super().__init__(vocab_size=vocab_size, first_token_id=2, eos_token_ids={1})
        self.now = 0.0
        self._shared = shared
        self._unit_s = unit_s
        self._device: list[Block] = []
        self._host: list[Block] = []
        self._chains: dict[Request, Block] = {}

    def clock(self) -> float:
        return self.now

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._device = [[0] * BLOCK_SIZE for _ in range(num_blocks)]
        self._host = [[0] * BLOCK_SIZE for _ in range(num_host_blocks)]

    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        _copy(self._device, self._host, batch.swap_out)
        _copy(self._host, self._device, batch.swap_in)
        written: set[tuple[int, int]] = set()
        for sequence in batch.scheduled:
            request = sequence.request
            start = request.num_computed_tokens
            end = start + sequence.num_scheduled_tokens
            assert start < end <= request.num_tokens
            assert sequence.samples == (end == request.num_tokens)
            chain = self._chain(request)
            for position in range(start, end):
                slot = request.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
                assert slot not in written, "two sequences write to one slot"
                written.add(slot)
                self._device[slot[0]][slot[1]] = chain[position]
        for sequence in batch.scheduled:
            request = sequence.request
            end = request.num_computed_tokens + sequence.num_scheduled_tokens
            held: Block = []
            for block in request.block_table:
                held += self._device[block]
            assert held[:end] == self._chain(request)[:end], "a sequence would attend to what is not its own"
        num_tokens = sum(s.num_scheduled_tokens for s in batch.scheduled)
        self.now += self._unit_s * (1 + len(batch.scheduled) / 4 + num_tokens / 16)
        return super().execute(batch)

    def _chain(self, request: Request) -> Block:
        chain = self._chains.setdefault(request, [])
        if len(chain) < request.num_tokens:
            parent = chain[-1] if chain else hash("" if self._shared else request.tenant)
            for token_id in (request.prompt_token_ids + request.output_token_ids)[len(chain) :]:
                parent = hash((parent, token_id))
                chain.append(parent)
        return chain


def _copy(source: list[Block], target: list[Block], pairs: list[tuple[int, int]]) -> None:
    assert len({t for _, t in pairs}) == len(pairs), "two blocks are copied to one"
    contents = [list(source[s]) for s, _ in pairs]
    for (_, t), content in zip(pairs, contents, strict=True):
        target[t] = content
