"""A model computed over whole steps on a GPU: steps of decodes alone by recorded graphs, where there are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import Operations
from workers.block_pool import BLOCK_SIZE
from workers.decode_graphs import CudaGraphRecorder, DecodeGraphs, Recorder
from workers.device_step import DeviceStep, is_decode, pack, step_shape, table_width, unpack
from workers.model_step import ModelStep
from workers.models.device_decoder import DeviceDecoder
from workers.models.layers import KVCache


@dataclass(frozen=True, slots=True)
class DeviceAttention:
    """Attention of all tokens of a step."""

    cache: KVCache
    step: DeviceStep
    scale: float
    operations: Operations

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        step = self.step
        self.operations.reshape_and_cache(key, value, keys, values, step.slot_mapping)
        return self.operations.paged_attention(
            query,
            keys,
            values,
            step.block_tables,
            step.seq_lens,
            step.query_start_loc,
            self.scale,
            sliding_window,
        )


class DeviceForward:
    """Not thread-safe. What it returns stays valid until the next step."""

    def __init__(self, model: DeviceDecoder) -> None:
        self.model = model
        self._graphs: DecodeGraphs | None = None

    def compute_logits(self, step: ModelStep, cache: KVCache) -> Tensor:
        """Stores the KV of all tokens; fp32 logits of the rows that sample, [rows, vocab_size]."""
        if self._graphs is not None and is_decode(step):
            logits = self._graphs.replay(step)
            if logits is not None:
                return logits
        shape = step_shape(step)
        on_gpu = self.model.device.type == "cuda"
        flat = pack(step, shape, pin_memory=on_gpu).to(self.model.device, non_blocking=True)
        return self._compute(unpack(flat, shape), cache)

    def record_graphs(self, cache: KVCache, buckets: Sequence[int], record: Recorder | None = None) -> None:
        """For steps of decodes with up to the largest of `buckets` sequences, which takes seconds. All ranks
        do it at the same time, with the same. `record`: None records CUDA graphs."""
        width = table_width(-(-self.model.max_model_len // BLOCK_SIZE))
        self._graphs = DecodeGraphs(
            buckets,
            width,
            self.model.vocab_size,
            self.model.device,
            lambda step: self._compute(step, cache),
            record or CudaGraphRecorder(),
        )

    def drop_graphs(self) -> None:
        """They name the memory of the KV cache."""
        self._graphs = None

    def _compute(self, step: DeviceStep, cache: KVCache) -> Tensor:
        model = self.model
        attention = DeviceAttention(cache, step, model.attention_scale, model.operations)
        hidden = model.forward(step.token_ids, step.positions, attention)
        if not len(step.sampled_rows):
            return torch.empty(0, model.vocab_size, device=model.device)
        return model.compute_logits(hidden.index_select(0, step.sampled_rows))
