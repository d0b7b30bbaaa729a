"""Fast mode of the decoders that have no path of their own: all tokens of a step at once, in bf16."""

from dataclasses import dataclass

from torch import Tensor

from kernels.paged_attention_cpu import PagedAttentionPlan, paged_attention_cpu, plan_paged_attention
from kernels.reshape_and_cache_ref import reshape_and_cache_ref
from workers.block_pool import BLOCK_SIZE
from workers.model_step import ModelStep
from workers.models.decoder import Decoder
from workers.models.layers import KVCache


@dataclass(frozen=True, slots=True)
class BatchedAttention:
    """Attention of all tokens of a step. `plans` are by sliding window."""

    cache: KVCache
    slot_mapping: Tensor
    plans: dict[int | None, PagedAttentionPlan]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        reshape_and_cache_ref(key, value, keys, values, self.slot_mapping)
        if self.cache.on_stored is not None:
            self.cache.on_stored(layer)
        # What decodes reads the memory of all heads as one piece.
        return paged_attention_cpu(query.contiguous(), keys, values, self.plans[sliding_window], scale=1.0)


class BatchedForward:
    """A model computed over whole steps."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def compute_logits(self, step: ModelStep, cache: KVCache) -> Tensor:
        """Stores the KV of all tokens; fp32 logits of the rows that sample, [rows, vocab_size]."""
        plans = {
            window: plan_paged_attention(
                step.block_tables, step.seq_lens, step.query_start_loc, BLOCK_SIZE, self.model.dtype, window
            )
            for window in set(self.model.config.layer_windows)
        }
        attention = BatchedAttention(cache, step.slot_mapping, plans)
        hidden = self.model.forward(step.token_ids, step.positions, attention)
        return self.model.compute_logits(hidden[step.sampled_rows])
