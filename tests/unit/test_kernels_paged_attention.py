"""The CPU kernel against its reference, and the reference against attention over unpaged keys."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.paged_attention_cpu import paged_attention_cpu, plan_paged_attention
from kernels.paged_attention_ref import paged_attention_ref
from kernels.reshape_and_cache_ref import reshape_and_cache_ref

BLOCK_SIZE = 16
HEAD_DIM = 32


class Sequences:
    """Random sequences laid out in a shuffled pool. `chunks` are (seq_len, query_len) pairs."""

    def __init__(
        self, chunks: list[tuple[int, int]], num_heads: int, num_kv_heads: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(len(chunks) * num_heads)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.seq_lens = [seq_len for seq_len, _ in chunks]
        counts = [-(-seq_len // BLOCK_SIZE) for seq_len in self.seq_lens]
        order = torch.randperm(sum(counts) + 3, generator=generator)
        self.tables = list(order[: sum(counts)].split(counts))
        pool = (len(order), BLOCK_SIZE, num_kv_heads, HEAD_DIM)
        # What other sequences left behind must not matter.
        self.key_cache, self.value_cache = random(*pool) * 9, random(*pool) * 9
        self.keys = [random(seq_len, num_kv_heads, HEAD_DIM) for seq_len in self.seq_lens]
        self.values = [random(seq_len, num_kv_heads, HEAD_DIM) for seq_len in self.seq_lens]
        for keys, values, table in zip(self.keys, self.values, self.tables, strict=True):
            position = torch.arange(len(keys))
            slots = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            reshape_and_cache_ref(keys, values, self.key_cache, self.value_cache, slots)
        self.query_start_loc = [0]
        for _, query_len in chunks:
            self.query_start_loc.append(self.query_start_loc[-1] + query_len)
        self.query = random(self.query_start_loc[-1], num_heads, HEAD_DIM)

    def reference(self, sliding_window: int | None) -> Tensor:
        return paged_attention_ref(
            self.query,
            self.key_cache,
            self.value_cache,
            torch.nn.utils.rnn.pad_sequence(self.tables, batch_first=True, padding_value=-1),
            torch.tensor(self.seq_lens),
            torch.tensor(self.query_start_loc),
            HEAD_DIM**-0.5,
            sliding_window,
        )

    def cpu(self, sliding_window: int | None) -> Tensor:
        plan = plan_paged_attention(
            [table.tolist() for table in self.tables],
            self.seq_lens,
            self.query_start_loc,
            BLOCK_SIZE,
            self.query.dtype,
            sliding_window,
        )
        return paged_attention_cpu(self.query, self.key_cache, self.value_cache, plan, HEAD_DIM**-0.5)

    def unpaged(self, sliding_window: int | None) -> Tensor:
        outputs = []
        for index, seq_len in enumerate(self.seq_lens):
            query = self.query[self.query_start_loc[index] : self.query_start_loc[index + 1]]
            distance = torch.arange(seq_len - len(query), seq_len)[:, None] - torch.arange(seq_len)
            visible = distance >= 0
            if sliding_window is not None:
                visible &= distance < sliding_window
            group = query.shape[1] // self.keys[index].shape[1]
            attended = F.scaled_dot_product_attention(
                query.transpose(0, 1),
                self.keys[index].repeat_interleave(group, dim=1).transpose(0, 1),
                self.values[index].repeat_interleave(group, dim=1).transpose(0, 1),
                attn_mask=visible,
            )
            outputs.append(attended.transpose(0, 1))
        return torch.cat(outputs)


DECODES = [(1, 1), (15, 1), (16, 1), (17, 1), (300, 1), (301, 1), (700, 1)]
CHUNKS = [(5, 5), (33, 17), (600, 600), (640, 37)]
BATCHES = {
    "one decode": [(77, 1)],
    "one long decode": [(1025, 1)],
    "decodes": DECODES,
    "one chunk": [(40, 40)],
    "a chunk longer than a query tile": [(1200, 1150)],
    "mixed": DECODES + CHUNKS,
    "mixed, prompts between decodes": [(20, 1), (30, 30), (21, 1), (400, 1), (9, 4), (22, 1)],
}


@pytest.mark.parametrize("sliding_window", [None, 1, 16, 100, 512])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_reference_and_cpu_kernel_equal_unpaged_attention(
    batch: str, heads: tuple[int, int], sliding_window: int | None
) -> None:
    sequences = Sequences(BATCHES[batch], *heads, torch.float32)
    expected = sequences.unpaged(sliding_window)
    torch.testing.assert_close(sequences.reference(sliding_window), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sequences.cpu(sliding_window), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sliding_window", [None, 1, 100])
@pytest.mark.parametrize("heads", [(4, 1), (7, 1), (6, 2), (3, 3)], ids=str)
def test_bf16_is_as_exact_as_its_rounding(heads: tuple[int, int], sliding_window: int | None) -> None:
    sequences = Sequences(BATCHES["mixed"], *heads, torch.bfloat16)
    expected = sequences.reference(sliding_window).float()
    difference = sequences.cpu(sliding_window).float() - expected
    relative_rmse = (difference.square().mean() / expected.square().mean()).sqrt().item()
    print(f"relative RMSE {relative_rmse:.2e}, max {difference.abs().max().item():.2e}")
    assert relative_rmse < 5e-3
    assert difference.abs().max() < 5e-2


def test_reference_is_bitwise_independent_of_the_batch() -> None:
    sequences = Sequences(BATCHES["mixed"], 4, 1, torch.float32)
    together = sequences.reference(512)
    for index in range(len(sequences.seq_lens)):
        start, end = sequences.query_start_loc[index], sequences.query_start_loc[index + 1]
        alone = paged_attention_ref(
            sequences.query[start:end],
            sequences.key_cache,
            sequences.value_cache,
            sequences.tables[index][None],
            torch.tensor([sequences.seq_lens[index]]),
            torch.tensor([0, end - start]),
            HEAD_DIM**-0.5,
            512,
        )
        assert torch.equal(alone, together[start:end])


def test_reshape_and_cache_refuses_a_slot_outside_the_pool() -> None:
    cache = torch.zeros(2, BLOCK_SIZE, 1, HEAD_DIM)
    new = torch.ones(1, 1, HEAD_DIM)
    for slot in (2 * BLOCK_SIZE, -1):
        with pytest.raises(IndexError):
            reshape_and_cache_ref(new, new, cache, cache.clone(), torch.tensor([slot]))
    assert not cache.any()
