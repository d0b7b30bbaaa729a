"""Executes scheduled batches with torch: owns the weights and the KV pool, knows nothing of queues.

Nothing is kept from step to step but the pool: what a request's tokens are and where their KV lies is read
from the request in every step, so preemption, resume and cancellation need no word with the runner.
"""

from collections.abc import Sequence, Set
from pathlib import Path

import torch
from torch import Tensor

from workers.batch import RunnerOutput, ScheduledSequence, SchedulerOutput
from workers.block_pool import BLOCK_SIZE
from workers.exact_forward import ExactForward
from workers.kv_memory import KVMemory
from workers.model_step import StepLimits, prepare_step
from workers.models.gemma import GemmaModel
from workers.models.gemma_fast import FastGemmaModel, gemma_shapes
from workers.models.gemma_weights import GemmaWeights
from workers.models.linear_choice import AUTO, choose_linears
from workers.sampler import Sampler
from workers.weights.gguf import GGUFFile


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
        linear: str = AUTO,
    ) -> None:
        """Loads the weights, which takes seconds. `num_threads` is torch's, for the whole process.

        `linear` says how the fast mode multiplies: see `choose_linears`. `eos_token_ids` are kept from
        requests that have not reached their min_tokens.

        Raises OSError or GGUFError (a ValueError) for a file that cannot be served, RuntimeError when the
        machine's matrix library cannot keep the promise of deterministic mode.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.deterministic = deterministic
        self.dtype = torch.float32 if deterministic else torch.bfloat16
        self._forward: ExactForward | FastGemmaModel
        with torch.inference_mode(), GGUFFile(weights_path) as gguf:
            weights = GemmaWeights(gguf)
            if deterministic:
                self._forward = ExactForward(GemmaModel(weights, max_model_len))
                self._model: GemmaModel | FastGemmaModel = self._forward.model
            else:
                choice = choose_linears(linear, gemma_shapes(weights), weights_path.parent)
                self._forward = self._model = FastGemmaModel(weights, choice, max_model_len)
        self._memory: KVMemory | None = None
        self._sampler = Sampler(eos_token_ids)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together that the model can take."""
        return self._model.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._model.vocab_size

    @property
    def bytes_per_block(self) -> int:
        """KV bytes that one block takes over all layers."""
        config = self._model.config
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
        config = self._model.config
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
        memory = self._allocated()
        limits = StepLimits(self.vocab_size, memory.num_blocks, self.max_model_len)
        step = prepare_step(scheduled, limits)
        return self._forward.compute_logits(step, memory.device)

    def _allocated(self) -> KVMemory:
        if self._memory is None:
            raise RuntimeError("initialize_kv_cache was not called")
        return self._memory
