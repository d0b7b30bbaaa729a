"""Executes scheduled batches with torch: owns the weights and the KV pool, knows nothing of queues.

Nothing is kept from step to step but the pool: what a request's tokens are and where their KV lies is read
from the request in every step, so preemption, resume and cancellation need no word with the runner.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernels.paged_attention_cpu import plan_paged_attention
from workers.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from workers.kv_memory import KVMemory
from workers.models.fast_linear import LinearKind, same_kind
from workers.models.gemma import GemmaModel
from workers.models.gemma_fast import FastGemmaModel, FastStep
from workers.models.layers import Attention, KVCache, Linear, TokenwiseAttention
from workers.sampler import Sampler
from workers.weights.gguf import GGUFFile

BLOCK_SIZE = 16

# Deterministic mode computes every matrix product at one shape, with this many rows (padded). In fp32 on a
# Xeon with 2 threads 16 rows take 1.1 ms a layer and 1 row 0.6.
TILE_ROWS = 16
# The output matrix is most of a small model: 34 ms for 4 rows, 49 for 16, and most steps sample few rows.
LOGIT_TILE_ROWS = 4


@dataclass(frozen=True, slots=True)
class _Step:
    """The scheduled tokens of a batch, one after another. Arrays are int64."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slot_mapping: Tensor  # [num_tokens]
    block_tables: list[Tensor]  # [blocks] for each sequence
    seq_lens: list[int]  # with this step's tokens
    query_start_loc: list[int]  # [num_seqs + 1]
    sampled_rows: list[int]  # the last row of each sequence that samples


class TorchModelRunner:
    """A `workers.batch.ModelRunner` over torch on CPUs.

    Fast mode multiplies int8 by int8 where the machine has it and batches all it can. With `deterministic`
    all is fp32 and every token is computed by operations whose shapes depend on nothing but its own position:
    logits are equal bit for bit whatever the batch, the chunks or the history (on one kind of machine with
    one number of threads).
    """

    def __init__(
        self,
        weights_path: Path,
        *,
        max_model_len: int | None = None,
        deterministic: bool = False,
        num_threads: int | None = None,
        eos_token_ids: Set[int] = frozenset(),
        linear: str = "int8",
    ) -> None:
        """Loads the weights, which takes seconds. `num_threads` is torch's, for the whole process.

        `eos_token_ids` are kept from requests that have not reached their min_tokens.

        Raises OSError or GGUFError (a ValueError) for a file that cannot be served, RuntimeError when the
        machine's matrix library cannot keep the promise of deterministic mode.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.deterministic = deterministic
        self.dtype = torch.float32 if deterministic else torch.bfloat16
        self.model: GemmaModel | FastGemmaModel
        with torch.inference_mode(), GGUFFile(weights_path) as gguf:
            if deterministic:
                self.model = GemmaModel(gguf, max_model_len)
                _check_row_invariance(self.model.linears, TILE_ROWS)
                _check_row_invariance([self.model.lm_head], LOGIT_TILE_ROWS)
            else:
                self.model = FastGemmaModel(
                    gguf, lambda rows, columns: same_kind(LinearKind(linear)), max_model_len
                )
        self._memory: KVMemory | None = None
        self._sampler = Sampler(eos_token_ids)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that the model can take."""
        return self.model.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.model.vocab_size

    @property
    def bytes_per_block(self) -> int:
        """KV bytes that one block takes over all layers."""
        config = self.model.config
        elements = 2 * config.num_layers * BLOCK_SIZE * config.num_kv_heads * config.head_dim
        return elements * self.dtype.itemsize

    @property
    def swap_bytes_per_s(self) -> float:
        """How fast blocks are copied between device and host memory, one way. Measured at the allocation."""
        return 0.0 if self._memory is None else self._memory.swap_bytes_per_s

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates the pools once; block ids are 0 … num_blocks - 1 and 0 … num_host_blocks - 1."""
        if self._memory is not None:
            raise RuntimeError("the KV cache is allocated already")
        config = self.model.config
        self._memory = KVMemory(
            num_blocks,
            num_host_blocks,
            num_layers=config.num_layers,
            block_shape=(BLOCK_SIZE, config.num_kv_heads, config.head_dim),
            dtype=self.dtype,
        )

    def free_kv_cache(self) -> None:
        """Gives the pools' memory back; `initialize_kv_cache` may then be called again, for another size."""
        self._memory = None

    @torch.inference_mode()
    def execute(self, batch: SchedulerOutput) -> RunnerOutput:
        """Copies the blocks that are swapped, then runs the batch: one entry per scheduled sequence, the
        sampled id, or None where none was due.

        Raises ValueError naming the request whose scheduled tokens or blocks do not fit (before anything is
        computed), RuntimeError when the model's output is not finite.
        """
        if batch.swap_out or batch.swap_in:
            self._allocated().swap(batch.swap_out, batch.swap_in)
        if not batch.scheduled:
            return RunnerOutput([])
        logits = self._logits(batch.scheduled)
        sampling = [sequence.request for sequence in batch.scheduled if sequence.samples]
        sampled = self._sampler.sample(logits, sampling)
        if len(sampling) == len(batch.scheduled):
            return RunnerOutput([*sampled.token_ids], sampled.logprobs)
        tokens, logprobs = iter(sampled.token_ids), iter(sampled.logprobs)
        samples = [sequence.samples for sequence in batch.scheduled]
        return RunnerOutput(
            [next(tokens) if each else None for each in samples],
            [next(logprobs) if each else None for each in samples] if sampled.logprobs else [],
        )

    @torch.inference_mode()
    def compute_logits(self, scheduled: Sequence[ScheduledSequence]) -> Tensor:
        """Writes the KV of the scheduled tokens and returns the logits of the sequences that sample.

        Returns fp32 [sequences that sample, vocab_size], in the order of `scheduled`.
        """
        return self._logits(scheduled).clone()

    def _logits(self, scheduled: Sequence[ScheduledSequence]) -> Tensor:
        """As `compute_logits`; the next call overwrites them."""
        cache = self._allocated().device
        step = self._prepare(scheduled)
        model = self.model
        if isinstance(model, GemmaModel):
            return self._forward_tiles(model, step, cache)
        windows = {model.config.layer_window(layer) for layer in range(model.config.num_layers)}
        plans = {
            window: plan_paged_attention(
                step.block_tables, step.seq_lens, step.query_start_loc, BLOCK_SIZE, self.dtype, window
            )
            for window in windows
        }
        fast_step = FastStep(
            step.token_ids,
            step.positions,
            step.slot_mapping,
            torch.tensor(step.sampled_rows, dtype=torch.int64),
            plans,
        )
        return model.compute_logits(fast_step, cache)

    def _allocated(self) -> KVMemory:
        if self._memory is None:
            raise RuntimeError("initialize_kv_cache was not called")
        return self._memory

    def _prepare(self, scheduled: Sequence[ScheduledSequence]) -> _Step:
        token_ids: list[npt.NDArray[np.int64]] = []
        positions: list[npt.NDArray[np.int64]] = []
        slots: list[npt.NDArray[np.int64]] = []
        block_tables: list[Tensor] = []
        seq_lens: list[int] = []
        query_start_loc = [0]
        sampled_rows: list[int] = []
        for sequence in scheduled:
            self._check(sequence)
            request = sequence.request
            start = request.num_computed_tokens
            end = start + sequence.num_scheduled_tokens
            seq_positions = np.arange(start, end)
            block_table = np.array(request.block_table[: -(-end // BLOCK_SIZE)], np.int64)
            token_ids.append(_tokens(sequence))
            positions.append(seq_positions)
            slots.append(block_table[seq_positions // BLOCK_SIZE] * BLOCK_SIZE + seq_positions % BLOCK_SIZE)
            block_tables.append(torch.from_numpy(block_table))
            seq_lens.append(end)
            query_start_loc.append(query_start_loc[-1] + len(seq_positions))
            if sequence.samples:
                sampled_rows.append(query_start_loc[-1] - 1)
        return _Step(
            token_ids=torch.from_numpy(np.concatenate(token_ids)),
            positions=torch.from_numpy(np.concatenate(positions)),
            slot_mapping=torch.from_numpy(np.concatenate(slots)),
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            sampled_rows=sampled_rows,
        )

    def _check(self, sequence: ScheduledSequence) -> None:
        request = sequence.request
        end = request.num_computed_tokens + sequence.num_scheduled_tokens
        problem = None
        if sequence.num_scheduled_tokens < 1 or end > request.num_tokens:
            problem = (
                f"num_scheduled_tokens {sequence.num_scheduled_tokens} from {request.num_computed_tokens} on "
                f"with {request.num_tokens} tokens known"
            )
        elif end > self.max_model_len:
            problem = f"{end} tokens, the model takes {self.max_model_len}"
        elif end > len(request.block_table) * BLOCK_SIZE:
            problem = f"block_table has {len(request.block_table)} blocks for {end} tokens"
        elif sequence.samples != (end == request.num_tokens):
            problem = f"samples is {sequence.samples} at {end} of {request.num_tokens} tokens"
        if problem is not None:
            raise ValueError(f"request {request.request_id.hex()}: {problem}")

    def _forward_tiles(self, model: GemmaModel, step: _Step, cache: KVCache) -> Tensor:
        """The batch in tiles of TILE_ROWS tokens, each through all layers.

        Tokens of a sequence are in order, so what a token attends to was stored by an earlier tile or, layer
        by layer, in its own.
        """
        num_tokens = len(step.token_ids)
        hidden = torch.empty(num_tokens, model.config.hidden_size)
        for start in range(0, num_tokens, TILE_ROWS):
            tile = slice(start, min(start + TILE_ROWS, num_tokens))
            attention = _tile_attention(step, cache, tile.start, tile.stop)
            padded = model.forward(
                _pad(step.token_ids[tile], TILE_ROWS), _pad(step.positions[tile], TILE_ROWS), attention
            )
            hidden[tile] = padded[: tile.stop - tile.start]
        sampled = hidden[step.sampled_rows]
        logits = torch.empty(len(sampled), self.vocab_size)
        for start in range(0, len(sampled), LOGIT_TILE_ROWS):
            rows = sampled[start : start + LOGIT_TILE_ROWS]
            padded = model.compute_logits(_pad(rows, LOGIT_TILE_ROWS))
            logits[start : start + len(rows)] = padded[: len(rows)]
        return logits


def _tile_attention(step: _Step, cache: KVCache, start: int, end: int) -> Attention:
    """Attention for rows start … end - 1 of a step: the sequences cut to what lies in there."""
    first = bisect_right(step.query_start_loc, start) - 1
    last = bisect_left(step.query_start_loc, end)
    ends = step.query_start_loc[first + 1 : last + 1]
    return TokenwiseAttention(
        cache,
        slot_mapping=step.slot_mapping[start:end],
        block_tables=pad_sequence(step.block_tables[first:last], batch_first=True),
        seq_lens=torch.tensor(step.seq_lens[first:last]) - (torch.tensor(ends) - end).clamp(min=0),
        query_start_loc=torch.tensor([0, *(min(each, end) - start for each in ends)]),
    )


def _tokens(sequence: ScheduledSequence) -> npt.NDArray[np.int64]:
    """The token ids that a sequence has scheduled, from prompt and output."""
    request = sequence.request
    prompt, output = request.prompt_token_ids, request.output_token_ids
    start = request.num_computed_tokens
    end = start + sequence.num_scheduled_tokens
    if start >= len(prompt):
        ids = output[start - len(prompt) : end - len(prompt)]
    else:
        ids = prompt[start:end] + output[: max(0, end - len(prompt))]
    return np.array(ids, np.int64)


def _pad(rows: Tensor, num_rows: int) -> Tensor:
    """rows and zeros, [num_rows, ...]."""
    padded = rows.new_zeros(num_rows, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def _check_row_invariance(linears: list[Linear], num_rows: int) -> None:
    """Raises RuntimeError if equal rows give unequal results: then places in a tile would matter."""
    generator = torch.Generator().manual_seed(0)
    for linear in linears:
        row = torch.randn(linear.in_features, generator=generator)
        rows = linear(row.repeat(num_rows, 1))
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            raise RuntimeError(
                f"deterministic mode: this machine's matrix library computes equal rows differently for "
                f"a matrix of {linear.out_features} x {linear.in_features}"
            )
